"""Running a model on the batches of the user: as a whole, or stretch by stretch."""
