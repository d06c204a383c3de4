"""Sweeps over cases: each is measured with one thread and with all of them, as long as there is time.

A measurement of this kind describes itself by a :class:`Sweep`, which is its command as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench.lib.budget import Budget
from bench.lib.program import program_parser
from bench.lib.record import merge_csv

Row = dict[str, object]


@dataclass(frozen=True)
class Sweep:
    """A measurement of many cases on one device.

    Attributes:
        name: name of its CSV file.
        key: columns that identify a row.
        cases: returns, for a device, functions by name that measure a case there and return its rows.
        case_s: no case is started with fewer seconds left.
    """

    name: str
    key: tuple[str, ...]
    cases: Callable[[torch.device], Mapping[str, Callable[[], list[Row]]]]
    case_s: float

    def measure(self, device: torch.device, budget: Budget) -> list[Row]:
        """Measure all cases, writing every row immediately; returns the rows."""
        rows: list[Row] = []
        threads = {torch.get_num_threads()}
        for number in sorted(threads | {1} if device.type == "cpu" else threads):
            torch.set_num_threads(number)
            for name, case in self.cases(device).items():
                if budget.allows(name, self.case_s):
                    found = case()
                    merge_csv(self.name, device, found, self.key)
                    print(*found, sep="\n", flush=True)
                    rows += found
        return rows

    def main(self, description: str | None) -> None:
        """Run the command line."""
        parser = program_parser(description)
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        self.measure(torch.device(parser.parse_args().device), Budget.of_this_process())
