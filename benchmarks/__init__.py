"""Times the ops beside what one would use without them: verify, time, one CSV a run.

`python -m benchmarks` runs the cases, `python -m benchmarks ops` prints the tables of
a CSV and `python -m benchmarks plot` draws its figures.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository's root."""
