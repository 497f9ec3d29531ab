"""The report of a run: rows of all cells as JSON, and tables as a page."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benches.gpu_cells.correctness import by_layout

Rows = list[dict[str, Any]]
# Cells of which the page shows fewer rows.
SUMMARIES = {"correctness": by_layout}


class Report:
    """Rows by cell in `FOLDER/gpu.json`, which a later run continues, and tables in `gpu.md`."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu.json"
        self.cells: dict[str, Rows] = (
            json.loads(self._path.read_text())["cells"] if self._path.exists() else {}
        )

    def add(self, cell: str, rows: Rows) -> None:
        """Writes the report with the rows of another cell."""
        self.cells[cell] = rows
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        report = {"date": date, "command": self._command, "cells": self.cells}
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(report, indent=1))
        written.replace(self._path)
        parts = [f"Measured on {date} by `{self._command}`."]
        parts += [f"## {name}\n\n{self.table(name)}" for name in self.cells]
        self._folder.joinpath("gpu.md").write_text("\n\n".join(parts) + "\n")

    def table(self, cell: str) -> str:
        """Returns the table of a cell as Markdown."""
        rows = self.cells[cell]
        if not rows:
            return "Not measured over an emulated device."
        if cell in SUMMARIES:
            rows = SUMMARIES[cell](rows)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [columns, ["---"] * len(columns)]
        lines += [[_shown(row.get(column, "")) for column in columns] for row in rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def limits(self) -> dict[str, float]:
        """Returns the limits of `Rig.limits` that were measured."""
        links = {row["direction"]: row["gb_s"] * 1e9 for row in self.cells.get("link", [])}
        disks = {f"disk {row['op']}": row["gb_s"] * 1e9 for row in self.cells.get("disk", [])}
        return links | disks


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
