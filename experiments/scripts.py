"""Scripts of benchmarks/ that answer a question: one file of results for each."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from claims import Claim, Script

from redivider.data.files import data_folder
from redivider.train.errors import TrainError

ROOT = Path(__file__).parents[1]


def run_scripts(claim: Claim, folder: Path, only: Sequence[str]) -> str:
    """Run the scripts that have not ended before, and return a line for each.

    Results of a script that was stopped are in a file that ends with .part. Some scripts go on
    where they were stopped, the others begin anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for script in claim.scripts:
        if not only or script.name in only:
            path = folder / f"{script.name}.json"
            if not path.exists():
                part = path.with_suffix(".part")
                _run(script, part)
                part.replace(path)
            lines.append(f"{script.name:16}{path}")
    return "\n".join(lines)


def _run(script: Script, path: Path) -> None:
    words = [word.format(out=path, data=data_folder(None)) for word in script.words]
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]]
    if "{out}" in script.words:
        done = subprocess.run(command)
    else:
        with path.open("w") as file:
            done = subprocess.run(command, stdout=file)
    if done.returncode:
        raise TrainError(
            f"benchmarks/{words[0]} ended with status {done.returncode}, as above; the same "
            "command runs it again, and not those that have ended"
        )
