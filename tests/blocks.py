"""What tests of a model's blocks share: a group of one process, and the code of a graph that is not divided."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_hook


@contextmanager
def called_one_by_one() -> Iterator[None]:
    """Register a hook of all modules: then every module of a graph is called as one."""
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    """Return the mesh of a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def make_flat(gm: fx.GraphModule) -> fx.GraphModule:
    """Let a model run its graph as one list of nodes; return it."""
    code = gm.graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    type(gm).forward = scope["forward"]
    return gm
