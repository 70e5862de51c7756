"""Codes of weights over the steps of a training: on which grids they lie, and how often they turn."""
