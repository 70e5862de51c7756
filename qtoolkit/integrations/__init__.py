"""Trainers of other packages with quantizers of qtoolkit. No module of qtoolkit imports these, which import the packages."""
