"""The report of a run: the rows of all cells, as JSON and as tables in Markdown. A cell is a
benchmark of `benches/gpu.py`, or an engine of `benches/gpu_vllm.py`.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Summary = Callable[[Rows], Rows]


class Report:
    """Rows by cell in `FOLDER/NAME.json`, which a later run continues, and tables in `NAME.md`.
    `summaries`: by cell, the function that makes the rows of the table from the rows of the cell.
    """

    def __init__(
        self, folder: Path, name: str, command: str, summaries: Mapping[str, Summary]
    ) -> None:
        self._command, self._summaries = command, summaries
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.json"
        self.cells: dict[str, Rows] = (
            json.loads(self._path.read_text())["cells"] if self._path.exists() else {}
        )

    def add(self, cell: str, rows: Rows) -> None:
        """Sets the rows of a cell, which replace earlier rows, and writes the report."""
        self.cells[cell] = rows
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        report = {"date": date, "command": self._command, "cells": self.cells}
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(report, indent=1))
        written.replace(self._path)
        parts = [f"Measured on {date} by `{self._command}`."]
        parts += [f"## {name}\n\n{self.table(name)}" for name in self.cells]
        self._path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")

    def table(self, cell: str) -> str:
        """Returns the table of a cell as Markdown."""
        rows = self.cells[cell]
        if not rows:
            return "Not measured, because the device is emulated."
        if cell in self._summaries:
            rows = self._summaries[cell](rows)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [columns, ["---"] * len(columns)]
        lines += [[_shown(row.get(column, "")) for column in columns] for row in rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def limits(self) -> dict[str, float]:
        """Returns the measured rates of the link ("to device", "from device", "both") and of the
        disk ("disk read", "disk write"), in bytes per second.
        """
        links = {row["direction"]: row["gb_s"] * 1e9 for row in self.cells.get("link", [])}
        disks = {f"disk {row['op']}": row["gb_s"] * 1e9 for row in self.cells.get("disk", [])}
        return links | disks


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
