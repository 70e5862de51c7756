"""Hugging Face models: a prepared model stays a PreTrainedModel; `save_pretrained` and `from_pretrained` keep quantizers.

Importing this module registers the method "qtoolkit" with transformers (register_quantization_config and register_quantizer).
`qtoolkit.prepare` and `qtoolkit.quant_modules.replace` import it if they get a PreTrainedModel.

A folder of `save_pretrained` contains the state dict with the quantizers, and the options of the quantization in the
`quantization_config` of config.json. `from_pretrained` quantizes the float model again, and loads the state.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import new_class
from typing import Any, NoReturn, TypedDict

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.generic import ModelOutput
from transformers.utils.quantization_config import QuantizationConfigMixin

from qtoolkit.backends import REQUIRED, backend_of, backends
from qtoolkit.batches import taken_arguments
from qtoolkit.checkpoint.record import PLAIN, decode, encode
from qtoolkit.config import QConfigMapping
from qtoolkit.errors import some
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.plan import Plan
from qtoolkit.prepare import prepare
from qtoolkit.quant_modules import replace
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.version import __version__

METHOD = "qtoolkit"


class Record(TypedDict):
    """The metadata of the state dict in a weight file."""

    tensors: list[tuple[str, list[int], str]]  # the names, with shapes and dtypes
    modules: object  # the metadata, encoded


@register_quantization_config(METHOD)
class QtoolkitConfig(QuantizationConfigMixin):
    """Quantization options of a Hugging Face model: the `quantization_config` of its config.

    `qtoolkit.prepare` and `qtoolkit.quant_modules.replace` set it, and `save_pretrained` writes it into config.json. If it is
    passed to `from_pretrained` with a float model, that model is quantized by module replacement; call `qtoolkit.calibrate`
    next.

    Args:
        backend: The name of the target (required).
        qconfig_mapping: The configs of the layers: a QConfigMapping, or its JSON.
        options: More keyword arguments of `replace`, or of `prepare` if there are inputs.
        inputs: Shape and dtype of the example input for each argument of forward. None: module replacement.
        training: Whether `prepare` got the model in training mode.
        lost: Arguments that JSON cannot hold; `from_pretrained` raises an error for such a folder.
        version: The version of qtoolkit.
        quant_method: "qtoolkit".

    Raises:
        ValueError: The backend is unknown.
        TypeError: `backend` is missing.

    Example:
        >>> from qtoolkit.integrations.transformers import QtoolkitConfig
        >>> QtoolkitConfig(backend="onnxruntime").to_dict()["quant_method"]
        'qtoolkit'
    """

    def __init__(
        self,
        backend: str = REQUIRED,
        qconfig_mapping: QConfigMapping | str | None = None,
        options: Mapping[str, object] | None = None,
        inputs: Mapping[str, tuple[list[int], str]] | None = None,
        training: bool = False,
        lost: tuple[str, ...] = (),
        version: str = __version__,
        quant_method: str = METHOD,
    ) -> None:
        # A custom Backend has no entry in the table, and is listed in `lost`.
        self.backend = backend if lost else backend_of(backend).name
        self.qconfig_mapping = (
            qconfig_mapping.to_json() if isinstance(qconfig_mapping, QConfigMapping) else qconfig_mapping
        )
        self.options, self.inputs = dict(options or {}), None if inputs is None else dict(inputs)
        self.training, self.lost = training, list(lost)
        self.version = version
        self.quant_method = quant_method  # type: ignore[assignment]  # an enum of transformers' own

    def quantized(self, model: PreTrainedModel) -> nn.Module:
        """Quantize a float model with these options; `replace` changes it in place, `prepare` returns another object.

        Raises ValueError for a model that was quantized with arguments that JSON cannot hold.
        """
        if self.lost:
            raise ValueError(
                f"from_pretrained: this model was quantized with {some(self.lost)}, which config.json cannot hold. Build the "
                "float model from its config, quantize it in the same way, and load the weights with "
                "qtoolkit.load_checkpoint(model, 'folder/model.safetensors')."
            )
        types = {type(module) for module in model.modules()}
        text = self.qconfig_mapping
        mapping = None if text is None else QConfigMapping.from_json(text, types)
        options: dict[str, Any] = {"backend": self.backend, "qconfig_mapping": mapping, "inplace": True, **self.options}
        if self.inputs is None:
            return replace(model, **options)
        inputs = {name: _example(model, *of) for name, of in self.inputs.items()}
        return prepare(model.train(self.training), inputs, **options)


def _example(model: PreTrainedModel, shape: list[int], dtype: str) -> Tensor:
    """Return an input of zeros for a model; its device or dtype may differ from the saved model."""
    kind = getattr(torch, dtype)
    return torch.zeros(shape, dtype=model.dtype if kind.is_floating_point else kind, device=model.device)


@register_quantizer(METHOD)
class QtoolkitQuantizer(HfQuantizer):
    """The quantizer class of transformers for models with a QtoolkitConfig.

    transformers loads the state of the quantizers together with the weights, into placeholder tensors in the float model.
    """

    quantization_config: QtoolkitConfig
    record: Record | None = None  # of the folder that is loaded
    placed: tuple[str, ...] = ()  # its entries that the float model does not have

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: object
    ) -> PreTrainedModel:
        if self.pre_quantized:
            self.record = _record_in(checkpoint_files)
            known = model.state_dict()
            saved = {
                key: torch.empty(size, dtype=getattr(torch, of), device="meta")
                for key, size, of in self.record["tensors"]
            }
            self.placed = tuple(key for key in saved if key not in known)
            for key in self.placed:
                _put_placeholder(model, key, saved[key])
            lacking = {f"^{key.replace('.', '[.]')}$" for key in known if key not in saved}  # folded batch norms
            model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *lacking}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> object:
        state = model.state_dict()
        for key in self.placed:
            _remove_placeholder(model, key)
        model.is_quantized = False  # to transformers, that is a model that cannot be cast: here all weights are float
        quantized = self.quantization_config.quantized(model)
        if self.record is not None:
            kept = {key: state[key] for key, *_ in self.record["tensors"]}
            loaded = OrderedDict(kept)
            loaded._metadata = decode(self.record["modules"])  # type: ignore[attr-defined]  # as torch does
            quantized.load_state_dict(loaded)
        if quantized is not model:  # from_pretrained returns the object that it has made
            object.__setattr__(model, "__class__", type(quantized))
            object.__setattr__(model, "__dict__", vars(quantized))
        return model.eval()

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
        """Return the record of a model for the metadata of its file; ValueError for a converted model."""
        if any(isinstance(module, Grid) for module in model.modules()):
            raise ValueError(
                "save_pretrained: this model is converted, but from_pretrained restores only prepared and replaced models; "
                "save the model before qtoolkit.convert, and call qtoolkit.convert after from_pretrained."
            )
        state = model.state_dict()
        tensors = [(key, list(value.shape), _name(value.dtype)) for key, value in state.items()]
        modules = encode(getattr(state, "_metadata", {}), "the metadata of the state dict")
        return None, {METHOD: json.dumps({"tensors": tensors, "modules": modules})}

    def is_serializable(self) -> bool:
        """Return True."""
        return True

    is_trainable = is_qat_trainable = True  # Trainer takes the model


def _record_in(files: Sequence[str] | None) -> Record:
    """Return the record in the metadata of a checkpoint's first file, or raise ValueError."""
    if files and str(files[0]).endswith(".safetensors"):
        with safe_open(files[0], framework="pt") as file:
            metadata = file.metadata() or {}
        if METHOD in metadata:
            record: Record = json.loads(metadata[METHOD])
            return record
    raise ValueError(
        "from_pretrained: config.json says that qtoolkit has quantized this model, but its weights are not a safetensors file "
        "that save_pretrained wrote for the quantized model; save the quantized model again."
    )


class _Placeholder(nn.Module):
    """Placeholder for a quantizer, or another module that only the quantized model has, while transformers loads its state."""


def _put_placeholder(model: nn.Module, key: str, tensor: Tensor) -> None:
    """Add a tensor to a float model that only the quantized model has: the bias of a layer without one, or a buffer."""
    *path, name = key.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, _Placeholder())
        model = model.get_submodule(part)
    if name in model._parameters:
        model._parameters[name] = nn.Parameter(tensor)
    else:
        model.register_buffer(name, tensor)


def _remove_placeholder(model: nn.Module, key: str) -> None:
    """Remove such a tensor, and the outermost module that was created for it."""
    *path, name = key.split(".")
    for part in path:
        if isinstance(model._modules.get(part), _Placeholder):
            del model._modules[part]
        if part not in model._modules:
            return
        model = model.get_submodule(part)
    if name in model._parameters:
        model._parameters[name] = None
    else:
        del model._buffers[name]


# ---- what prepare and replace keep


# Methods of transformers that change forward, without effect on a graph: the reason, and the alternative.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("activation_checkpointing_enable", "gradient_checkpointing_enable"),
        "its graph stores the activations; checkpoint blocks of it (qtoolkit's docs/two_modes.md), or quantize the model "
        "with qtoolkit.quant_modules.replace",
    ),
    "set_attn_implementation": "its graph has the attention of the float model; call it before qtoolkit.prepare",
    "resize_token_embeddings": "its graph has the sizes of the float model; call it before qtoolkit.prepare",
}
# Arguments of generate that need a cache of keys and values. Arguments of forward about the cache, or that omit tokens.
NEED_CACHE = (
    "use_cache", "past_key_values", "cache", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens",
    "inputs_embeds",
)  # fmt: skip
LEFT_OUT = ("use_cache", "past_key_values", "cache", "logits_to_keep")  # cache: since transformers 5.24


@cache
def graph_module_type(kind: type[nn.Module]) -> type[QuantizedGraphModule]:
    """Return the type of prepared models for a transformers class: a QuantizedGraphModule that also derives from that class."""
    members: dict[str, object] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__init_subclass__": _ignore,
        "model_class": kind,
        **{name: _refusal(name, why) for name, why in REFUSED.items()},
    }
    own = (_Prepared, _Generating) if issubclass(kind, GenerationMixin) else (_Prepared,)
    return new_class(kind.__name__, (QuantizedGraphModule, *own, _Bare, kind), {}, lambda names: names.update(members))


class _Prepared(nn.Module):
    """Methods that a prepared model shares with its class, without the class's Python forward."""

    def __call__(self, *args: object, return_dict: bool | None = None, **kwargs: object) -> object:
        """Compute the outputs, as the output object of the model's class or, with `return_dict=False`, as a tuple."""
        output = super().__call__(*args, **kwargs)
        return output.to_tuple() if return_dict is False and isinstance(output, ModelOutput) else output


class _Generating(nn.Module):
    """Generates text without a cache of keys and values: each token takes a forward of the whole text."""

    config: PreTrainedConfig

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Generate text like the model's class, without a cache; NotImplementedError if a cache or an encoder is needed."""
        found = [name for name in NEED_CACHE if kwargs.get(name) is not None and kwargs[name] is not False]
        if found or self.config.is_encoder_decoder:
            why = (
                f"{found[0]} needs a cache of keys and values, which its graph does not have; remove the argument, or"
                if found
                else "generate runs the encoder alone, which its graph cannot do;"
            )
            raise NotImplementedError(
                f"generate: this model was prepared, and {why} quantize the model with qtoolkit.quant_modules.replace, which "
                "keeps its Python forward."
            )
        return super().generate(*args, **{**kwargs, "use_cache": False})  # type: ignore[misc]  # of the model's class

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: object, **kwargs: object) -> dict[str, object]:
        """Return the inputs for the next token: the arguments that the model's class makes, for the graph.

        Raises ValueError for padded texts if the graph has no mask argument, and for another argument that it lacks.
        """
        made: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        given = {name: value for name, value in made.items() if name not in LEFT_OUT}
        words, taken = given["input_ids"], taken_arguments(self)
        without_padding = {
            "attention_mask": torch.ones_like(words),
            "position_ids": torch.arange(words.shape[1], device=words.device).expand_as(words),
        }
        for name in given.keys() - {*taken, *without_padding}:
            value = given.pop(name)
            if value is not None and value is not False:
                raise ValueError(
                    f"generate: the graph of this model does not take {name!r}; set it in model.config, or pass it in the "
                    "example_inputs, before qtoolkit.prepare, or quantize the model with qtoolkit.quant_modules.replace."
                )
        for name, plain in without_padding.items():
            value = given.pop(name, None)
            if name in taken:
                given[name] = plain if value is None else value
            elif value is not None and not torch.equal(value.expand_as(plain), plain):
                raise ValueError(
                    f"generate: the texts are padded, but this model was prepared without {name!r}, which marks the padding; "
                    "pass it in the example_inputs of qtoolkit.prepare, or quantize the model with "
                    "qtoolkit.quant_modules.replace."
                )
        return given


class _Bare(nn.Module):
    """Ends the constructor chain of torch.fx: a prepared model does not build the model's layers."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


@classmethod  # type: ignore[misc]  # of the classes that get it
def _ignore(cls: type, **kwargs: object) -> None:
    """Do nothing: subclass hooks of a model's class are not meant for prepared models."""


def _refusal(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name}: this model was prepared, and {why}.")

    return refuse


def attributes_of(model: nn.Module) -> dict[str, object]:
    """Return the attributes that the prepared model needs too: the config, and attributes that its methods read."""
    own = vars(nn.Module())
    return {name: value for name, value in vars(model).items() if name not in own and not isinstance(value, Tensor)}


def note(model: Any, plan: Plan, options: Mapping[str, object], inputs: Mapping[str, object] | None = None) -> None:
    """Set the quantization_config of a quantized model's config.

    `options` are the arguments of the call that are not in the plan and have no false default value. `inputs` has the example
    input for each argument of forward, and is None for module replacement.
    """
    given, traced = inputs or {}, isinstance(model, QuantizedGraphModule)
    plain = {name: value for name, value in options.items() if value and _is_plain(value)}
    lost = [name for name, value in options.items() if value and name not in plain]
    lost += [f"an input {name!r} that is not a tensor" for name, x in given.items() if not isinstance(x, Tensor)]
    lost += ["a custom Backend"] * (backends.get(plan.backend.name) != plan.backend)
    lost += ["prepare without example_inputs"] * (traced and inputs is None)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    shapes = {name: (list(x.shape), _name(x.dtype)) for name, x in tensors.items()} if traced else None
    config = QtoolkitConfig(plan.backend.name, plan.mapping, plain, shapes, plan.tracing.training, tuple(lost))
    model.config.quantization_config = config
    # No renaming of old checkpoint names: transformers finds them by patterns that also match names of quantizers, and its
    # Trainer resumes from the names in the file.
    own = {"hf_quantizer": QtoolkitQuantizer(config, pre_quantized=True), "_weight_conversions": []}
    for name, value in own.items():
        model.keep(name, value) if traced else setattr(model, name, value)


def _is_plain(value: object) -> bool:
    """Return whether JSON can hold a value."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, PLAIN)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
