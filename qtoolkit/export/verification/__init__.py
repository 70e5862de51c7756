"""Verification: the codes of runtimes beside the model's."""
