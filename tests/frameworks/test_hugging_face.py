"""Models of Hugging Face: both routes, training, files, from_pretrained, Trainer, generate."""

import copy
import json
import math
import sys
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qtoolkit as qt

hf = pytest.importorskip("transformers", reason="tests models of Hugging Face; install the extra [training]")
from benchmarks.pages.zoo_models.transformers_models import BART, WORDS, pairs, tokens  # noqa: E402
from benchmarks.pages.zoo_models.transformers_models import MODELS as ZOO  # noqa: E402
from benchmarks.pages.zoo_models.transformers_models import TESTED as MODELS  # noqa: E402  # the zoo has them and more
from qtoolkit.integrations.transformers import QtoolkitConfig  # noqa: E402  # needs transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:prepare. Python tests whether values are finite"),
    pytest.mark.filterwarnings("ignore:quantizer .* rounds its whole input to zero"),  # one batch is little data
]
ROUTES = ("prepared", "replaced")
IN_EACH_RUN = {"vit", "segformer", "bert", "gpt2", "detr"}
NAMES = [name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.sweep) for name in MODELS]


def built(name: str, training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = ZOO[name].build(hf)
    return model.train(training and ZOO[name].training)


def quantized(name: str, route: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a calibrated model and a batch. What no batch reaches stays in float, as the report of calibrate advises."""
    model, inputs = built(name), MODELS[name].inputs()
    if route == "prepared":
        ours = qt.prepare(model, inputs, "onnxruntime", **options)
        qt.calibrate(ours, [inputs], progress=False)
        return ours, inputs
    unreached = qt.calibrate(qt.quant_modules.replace(model, backend="onnxruntime"), [inputs], progress=False).unreached
    layers = [quantizer.rpartition(".")[0] for quantizer in unreached]
    ours = qt.quant_modules.replace(model, backend="onnxruntime", exclude=layers, **options)
    qt.calibrate(ours, [inputs], progress=False)
    return ours, inputs


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def equal(a: Any, b: Any) -> bool:
    return len(tensors(a)) == len(tensors(b)) and all(map(torch.equal, tensors(a), tensors(b)))


def train(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(qt.parameter_groups(model, lr=1e-2))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = next(x for x in tensors(model(**inputs)) if x.is_floating_point()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a larger step makes scores of detectors equal
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sweep(1)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_trained_and_its_file_has_its_codes(name: str, route: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="runs exported files; install the extra [onnx]")
    model, inputs = quantized(name, route)
    expected = built(name).eval()(**inputs)
    with qt.disable_quantization(model):
        output = model.eval()(**inputs)
        assert type(output) is type(expected)
        assert list(output) == list(expected)
        for ours, theirs in zip(tensors(output), tensors(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # batch norms are folded in eval mode
    assert isinstance(model, type(built(name)))
    assert model.config.model_type == built(name).config.model_type
    losses = train(model.train(MODELS[name].training), inputs, 3)
    assert all(map(math.isfinite, losses))
    result: Any = qt.export_onnx(model.eval(), inputs, tmp_path / "model.onnx", exporter="torchscript")
    assert result.verification.weight_codes.differing == 0
    assert result.verification.quantizer_codes.differing == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_restores_it_with_its_quantizers(name: str, route: str, tmp_path: Path) -> None:
    model, inputs = quantized(name, route)
    train(model.train(MODELS[name].training), inputs, 2)
    output = model.eval()(**inputs)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["quantization_config"]["quant_method"] == "qtoolkit"
    assert saved["architectures"] == [type(built(name)).__name__]
    again, about = type(built(name)).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert equal(again(**inputs), output)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert type(again(**inputs)) is type(output)
    assert equal(qt.convert(again.float())(**inputs), qt.convert(model)(**inputs))
    assert math.isfinite(train(again.train(MODELS[name].training), inputs, 1)[0])


@pytest.mark.slow
def test_outputs_inside_outputs_keep_their_classes() -> None:
    model, inputs = built("clip").eval(), MODELS["clip"].inputs()
    prepared = qt.prepare(model, inputs, "onnxruntime")
    with qt.disable_quantization(prepared):
        output, expected = prepared(**inputs), model(**inputs)
    assert type(output.vision_model_output) is type(expected.vision_model_output)
    assert torch.equal(output.logits_per_image, expected.logits_per_image)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_values_that_transformers_captures_by_hooks_are_outputs(option: str) -> None:
    model, inputs = built("bert").eval(), tokens()
    model.set_attn_implementation("eager")
    setattr(model.config, option, True)
    prepared = qt.prepare(model, inputs, "onnxruntime")
    with qt.disable_quantization(prepared):
        assert equal(prepared(**inputs), model(**inputs))
        assert list(prepared(**inputs)) == ["logits", option.removeprefix("output_")]


def test_a_part_that_is_not_traced_may_return_an_output() -> None:
    model, inputs = built("bert").eval(), tokens()
    prepared = qt.prepare(model, inputs, "onnxruntime", untraced=["bert"])
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(**inputs).logits, model(**inputs).logits)


def test_quantize_when_loading(tmp_path: Path) -> None:
    built("vit").save_pretrained(tmp_path)
    mapping = qt.QConfigMapping().exclude("classifier")
    config = QtoolkitConfig(backend="onnxruntime", qconfig_mapping=mapping)
    model = hf.ViTForImageClassification.from_pretrained(tmp_path, quantization_config=config)
    inputs = MODELS["vit"].inputs()
    qt.calibrate(model, [inputs], progress=False)
    assert type(model.classifier) is nn.Linear
    expected = qt.quant_modules.replace(built("vit", training=False), mapping, backend="onnxruntime")
    qt.calibrate(expected, [inputs], progress=False)
    assert equal(model(**inputs), expected(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_folder_restores_learned_scales_and_rules_for_types(route: str, tmp_path: Path) -> None:
    learned = qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(bits=4, axis=0, quantizer="lsq"))
    mapping = qt.QConfigMapping().set_global(learned).exclude(type(built("vit").vit.embeddings.patch_embeddings))
    model, inputs = built("vit"), MODELS["vit"].inputs()
    if route == "prepared":
        ours = qt.prepare(model, inputs, "onnxruntime", mapping)
    else:
        ours = qt.quant_modules.replace(model, mapping, backend="onnxruntime")
    qt.calibrate(ours, [inputs], progress=False)
    train(ours.train(), inputs, 2)
    ours.eval().save_pretrained(tmp_path)
    again = hf.ViTForImageClassification.from_pretrained(tmp_path)
    assert type(again.vit.embeddings.patch_embeddings.projection) is nn.Conv2d
    assert again.vit.layers[0].mlp.fc1.weight_quantizer.spec == learned.weight
    assert equal(again(**inputs), ours(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_folder_is_loaded_in_another_dtype(route: str, tmp_path: Path) -> None:
    model, inputs = quantized("vit", route)
    model.eval().save_pretrained(tmp_path)
    again = hf.ViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    scales = {name: q.scale for name, q in qt.quantizers_of(model).items()}
    assert all(torch.equal(q.scale, scales[name]) for name, q in qt.quantizers_of(again).items() if not q.of_weight)
    logits = again(pixel_values=inputs["pixel_values"].bfloat16()).logits
    torch.testing.assert_close(logits.float(), model(**inputs).logits, rtol=0.1, atol=0.05)


def test_a_replaced_model_recomputes_activations() -> None:
    model, inputs = quantized("vit", "replaced")

    def gradients() -> list[Tensor]:
        model.train().zero_grad()
        model(**inputs).logits.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    model.activation_checkpointing_enable()
    assert all(map(torch.equal, gradients(), expected))


def test_a_transformers_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qtoolkit.integrations.transformers", None)
    with pytest.raises(
        ImportError, match="the installed transformers lacks a name that qtoolkit needs.*install a later transformers"
    ):
        qt.quant_modules.replace(built("vit"), backend="tensorrt10")


@pytest.mark.slow
def test_what_a_folder_cannot_hold_is_refused(tmp_path: Path) -> None:
    model, inputs = quantized("vit", "prepared")
    with pytest.raises(ValueError, match="this model is converted.*call qtoolkit.convert after from_pretrained"):
        qt.convert(model).save_pretrained(tmp_path)
    own = changed(qt.backends["onnxruntime"], name="chip", residual_add="identity")
    qt.prepare(built("vit"), inputs, own).save_pretrained(tmp_path / "own")
    saved = json.loads((tmp_path / "own" / "config.json").read_text())["quantization_config"]
    assert saved["backend"] == "chip"
    with pytest.raises(ValueError, match=r"quantized with a custom Backend, which config.json cannot hold"):
        hf.ViTForImageClassification.from_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "weights")
    built("vit").save_pretrained(tmp_path / "float")
    (tmp_path / "float" / "model.safetensors").rename(tmp_path / "weights" / "model.safetensors")
    with pytest.raises(ValueError, match="its weights are not a safetensors file that save_pretrained wrote for the"):
        hf.ViTForImageClassification.from_pretrained(tmp_path / "weights")


def classify(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize("route", [*ROUTES, "prepared without labels"])
def test_trainer_resumes_bit_for_bit(route: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it; install the extra [training]")
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (32, 12), generator=generator)
    mask = torch.ones(12, dtype=torch.long)
    data = [{"input_ids": each, "attention_mask": mask, "labels": each[0] % 2} for each in words]
    batch = {name: torch.stack([each[name] for each in data[:4]]) for name in data[0]}
    loss = None
    if route == "prepared without labels":
        loss = classify
        del batch["labels"]

    def trainer(folder: str) -> Any:
        model = built("bert")
        if route == "replaced":
            model = qt.quant_modules.replace(model, backend="onnxruntime")
        else:
            model = qt.prepare(model, batch, "onnxruntime")
        qt.calibrate(model, [batch], progress=False)
        options = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True}
        quiet = {"report_to": [], "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 3}
        arguments = hf.TrainingArguments(str(tmp_path / folder), **options, **quiet, learning_rate=1e-3)
        return hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], compute_loss_func=loss)

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected = whole.model.eval()(**batch)
    assert whole.evaluate()["eval_loss"] == resumed.evaluate()["eval_loss"]
    assert equal(resumed.model.eval()(**batch), expected)
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert equal(loaded(**batch), expected)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.sweep)])
def test_a_replaced_decoder_generates(name: str) -> None:
    model, inputs = built(name).eval(), tokens()
    model.config.use_cache = True
    replaced = qt.quant_modules.replace(model, backend="onnxruntime")
    qt.calibrate(replaced, [inputs], progress=False)
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    words = replaced.generate(**inputs, **greedy)
    assert words.shape == (2, 17)
    assert torch.equal(words, qt.convert(replaced).generate(**inputs, **greedy))
    assert torch.equal(words, replaced.generate(**inputs, **greedy, use_cache=False))


GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
NEED_CACHE = {
    "use_cache": True,
    "cache_implementation": "static",
    "past_key_values": hf.DynamicCache(),
    "prompt_lookup_num_tokens": 2,
    "inputs_embeds": torch.zeros(2, 3, 32),
}
DECODERS = [
    "gpt2",
    *(pytest.param(name, marks=pytest.mark.sweep) for name in ("llama", "opt", "qwen3", "gemma2", "falcon", "gptneox")),
]


def prepared_decoder(name: str, inputs: dict[str, Tensor], **options: Any) -> Any:
    model = built(name).eval()
    model.config.use_cache = True
    prepared: Any = qt.prepare(model, inputs, "onnxruntime", **options)
    qt.calibrate(prepared, [inputs], progress=False)
    return prepared


def greedily(model: nn.Module, words: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return a text with five more words, each from a forward of the whole text."""
    for _ in range(5):
        inputs = {"input_ids": words, "attention_mask": torch.ones_like(words) if mask is None else mask}
        if mask is not None:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(0)
            mask = torch.cat([mask, mask[:, -1:]], 1)
        words = torch.cat([words, model(**inputs).logits[:, -1:].argmax(-1)], 1)
    return words


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("untraced", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_a_prepared_decoder_generates_without_a_cache(name: str, untraced: bool) -> None:
    inputs = tokens()
    part = [built(name).base_model_prefix] if untraced else []
    prepared = prepared_decoder(name, inputs, concrete_args={"use_cache": False}, untraced=part)
    expected = greedily(prepared, inputs["input_ids"])
    for model in (prepared, copy.deepcopy(prepared), qt.convert(prepared)):
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    assert torch.equal(prepared.generate(inputs["input_ids"], **GREEDY, num_beams=2)[:, :12], inputs["input_ids"])
    chosen = prepared.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(chosen.sequences, expected)
    assert len(chosen.scores) == 5
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared.generate(**inputs, **GREEDY), built(name).eval().generate(**inputs, **GREEDY))


def test_a_part_that_is_not_traced_may_make_a_cache_that_generate_leaves_out() -> None:
    inputs = tokens()
    prepared = prepared_decoder("gpt2", inputs, untraced=["transformer"])
    assert isinstance(prepared(**inputs).past_key_values, hf.DynamicCache)
    assert torch.equal(prepared.generate(**inputs, **GREEDY), greedily(prepared, inputs["input_ids"]))


@pytest.mark.slow
def test_a_prepared_decoder_generates_from_padded_texts_where_it_knows_their_positions() -> None:
    inputs = tokens()
    inputs["attention_mask"][0, :5] = 0
    fixed = {"use_cache": False}
    without = prepared_decoder("gpt2", inputs, concrete_args=fixed)
    with pytest.raises(
        ValueError, match="generate: the texts are padded, .* without 'position_ids'.* in the example_inputs of"
    ):
        without.generate(**inputs, **GREEDY)
    positions = {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(0)}
    prepared = prepared_decoder("gpt2", {**inputs, **positions}, concrete_args=fixed)
    expected = greedily(prepared, inputs["input_ids"], inputs["attention_mask"])
    assert torch.equal(prepared.generate(**inputs, **GREEDY), expected)
    only_words = prepared_decoder("gpt2", {"input_ids": inputs["input_ids"]}, concrete_args=fixed)
    assert only_words.generate(inputs["input_ids"], **GREEDY).shape == (2, 17)
    with pytest.raises(ValueError, match="without 'attention_mask'.*qtoolkit.quant_modules.replace"):
        only_words.generate(**inputs, **GREEDY)


@pytest.mark.parametrize("argument", NEED_CACHE)
def test_what_needs_a_cache_is_refused_with_a_remedy(argument: str) -> None:
    prepared = prepared_decoder("gpt2", tokens(), concrete_args={"use_cache": False})
    with pytest.raises(
        NotImplementedError, match=f"generate: .*{argument} needs a cache.*remove the argument, or .*replace"
    ):
        prepared.generate(**tokens(), **GREEDY, **{argument: NEED_CACHE[argument]})


def test_an_argument_that_the_graph_does_not_take_is_refused_with_a_remedy() -> None:
    prepared = prepared_decoder("gpt2", tokens(), concrete_args={"use_cache": False})
    with pytest.raises(
        ValueError, match="generate: the graph of this model does not take 'output_attentions'.*replace"
    ):
        prepared.generate(**tokens(), **GREEDY, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="generate: the graph of this model does not take 'token_type_ids'"):
        prepared.generate(**tokens(), **GREEDY, token_type_ids=torch.zeros(2, 12, dtype=torch.long))


def test_a_prepared_model_with_an_encoder_says_how_to_generate() -> None:
    model = hf.BartForConditionalGeneration(hf.BartConfig(**BART, pad_token_id=0)).eval()
    prepared: Any = qt.prepare(model, pairs(), "onnxruntime", concrete_args={"use_cache": False})
    with pytest.raises(NotImplementedError, match="generate runs the encoder alone.*qtoolkit.quant_modules.replace"):
        prepared.generate(**tokens(), **GREEDY)


def test_a_decoder_whose_parts_are_prepared_generates_with_its_cache() -> None:
    inputs = tokens()
    model = built("gpt2").eval()
    model.config.use_cache = True
    in_parts = qt.prepare_parts(model, inputs, backend="onnxruntime")
    qt.calibrate(in_parts, [inputs], progress=False)
    graphs = [name for name, m in in_parts.named_modules() if isinstance(m, qt.graph.QuantizedGraphModule)]
    assert graphs == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    expected = greedily(in_parts, inputs["input_ids"])
    assert torch.equal(in_parts.generate(**inputs, **GREEDY), expected)
    assert torch.equal(in_parts.generate(**inputs, **GREEDY, use_cache=False), expected)


def test_a_prepared_part_with_a_fixed_argument_says_so_when_generate_passes_another_value() -> None:
    inputs, model = tokens(), built("gpt2").eval()
    model.transformer = qt.prepare(model.transformer, inputs, "onnxruntime", concrete_args={"use_cache": False})
    with pytest.raises(
        ValueError, match="(past_key_values|cache) has been specialized.*or.*qtoolkit.quant_modules.replace"
    ):
        model.generate(**inputs, **GREEDY)
    with pytest.raises(AssertionError, match="use_cache .* has fixed this argument.*qtoolkit.quant_modules.replace"):
        model(**inputs, use_cache=True)


def test_a_prepared_model_returns_a_tuple_on_demand() -> None:
    prepared, inputs = quantized("bert", "prepared")
    prepared.eval()
    assert torch.equal(prepared(**inputs, return_dict=True).logits, prepared(**inputs).logits)
    assert equal(prepared(**inputs, return_dict=False), (prepared(**inputs).logits,))
    assert type(prepared(**inputs, return_dict=False)) is tuple


@pytest.mark.slow
def test_a_prepared_decoder_takes_texts_of_any_length_and_refuses_what_its_graph_does_not_follow() -> None:
    model, inputs = built("gpt2").eval(), tokens()
    model.config.use_cache = True
    with pytest.raises(qt.UntraceableError, match=r"returns a DynamicCache.*concrete_args=\{'use_cache': False\}"):
        qt.prepare(model, inputs, "onnxruntime")
    prepared = qt.prepare(model, inputs, "onnxruntime", concrete_args={"use_cache": False})
    qt.calibrate(prepared, [inputs], progress=False)
    shorter = {name: x[:1, :7] for name, x in inputs.items()}
    assert prepared(**shorter).logits.shape == (1, 7, WORDS)
    with pytest.raises(
        NotImplementedError, match=r"activation_checkpointing_enable: .*its graph stores the activations"
    ):
        prepared.activation_checkpointing_enable()
    with pytest.raises(NotImplementedError, match=r"set_attn_implementation: .*call it before qtoolkit.prepare"):
        prepared.set_attn_implementation("eager")
