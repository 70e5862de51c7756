"""Other packages' models and trainers with quantizers of qtoolkit. Each module imports its package."""
