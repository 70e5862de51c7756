"""Integrations: models and trainers of other packages with qtoolkit's quantizers. Each module imports its package."""
