"""What takes long, and writes files of results and pages: `python -m benchmarks.pages.NAME`."""
