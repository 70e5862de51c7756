"""Checkpoints of models and trainings in safetensors files: no pickles, always complete, for any number of processes.

A checkpoint is one file, or a folder that all processes write together. docs/distributed.md describes the content.
"""

from qtoolkit.checkpoint.save_load import Checkpoint, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]
