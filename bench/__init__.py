"""The same work done by this service and by what a user might pick instead, measured side by side.

`python -m bench PART` (or `make bench` for all). See docs/benchmarks.md.
"""
