"""Write the generated parts of the documentation: ``make tables``.

They are the outputs of the command (:mod:`docs.console`), tables in ``operators.md``, ``kernels.md`` and
``design/patches.md``, the page ``reference/compressors.md``, the picture ``lanes.svg``, and tables of results in the
pages of ``measurements/``, in ``howto/fsdp.md`` and in the README. A test says when they are out of date.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import gckernels
from bench.lib import (
    auto_tables,
    kernel_tables,
    prediction_tables,
    sharded_tables,
    step_tables,
    training_tables,
    updates_tables,
)
from bench.lib.record import RESULTS, read_csv
from bench.lib.rounds import markdown, markdown_of_cells
from docs import console
from docs.lanes import svg
from gckernels.toolkit.sparsifier.entries import VALUE_BITS
from harness.machine_code import pipes

FOLDER = Path(__file__).parent
NUMEL = 2**20
ENTRIES_NUMEL = 2**24
PIPES = RESULTS / "pipes.csv"


def operators_table() -> str:
    """One row for every compressor of the package."""
    head = ["class", "bits per element", f"bytes of {NUMEL:,} elements", "feedback", "adds up", "random"]
    rows = []
    for name, cls in _classes():
        if not issubclass(cls, gckernels.Codec):
            continue
        compressor = cls()
        nbytes = compressor.payload_nbytes(NUMEL)
        yes = {True: "yes", False: "no"}
        rows.append(
            [
                f"[`{name}({', '.join(compressor.config_fields)})`](reference/compressors.md#{name.lower()})",
                f"{8 * nbytes / NUMEL:.3g}",
                f"{nbytes:,}",
                yes[compressor.traits.needs_feedback] + ("" if compressor.traits.conserves else ", a momentum"),
                yes[compressor.traits.summable],
                yes[compressor.traits.stochastic] + (", unbiased" if compressor.traits.unbiased else ""),
            ]
        )
    return markdown_of_cells(head, rows)


def entries_table() -> str:
    """One row for every share of elements that a sparsifier sends: what an entry takes, beside its entropy.

    The entropy, in bits per entry, is that of choosing ``k`` among the elements with equal probability. Bytes per entry
    are those of the whole payload.
    """
    rows = []
    for ratio in (0.0001, 0.001, 0.01, 0.1, 0.25):
        compressors = {bits: gckernels.TopK(ratio=ratio, value_bits=bits) for bits in VALUE_BITS}
        k, layout = compressors[32].capacity(ENTRIES_NUMEL), compressors[32].layout(ENTRIES_NUMEL)
        index_bits = (layout["highs"].nbytes + layout["lows"].nbytes) * 8 / k
        ways = math.lgamma(ENTRIES_NUMEL + 1) - math.lgamma(k + 1) - math.lgamma(ENTRIES_NUMEL - k + 1)
        row = {
            "ratio": f"{ratio:.2%}",
            "bits per index": f"{index_bits:.2f}",
            "entropy": f"{ways / math.log(2) / k:.2f}",
        }
        for bits, compressor in compressors.items():
            row[f"bytes per entry, {bits}-bit values"] = f"{compressor.payload_nbytes(ENTRIES_NUMEL) / k:.2f}"
        rows.append(row)
    return markdown(rows, list(rows[0]))


def patches_table() -> str:
    """One row for every learning rate: the bits of a changed element in a patch and in other encodings, and speeds."""
    bits = {"entropy": "entropy", "patch": "patch", "int32_bf16": "int32 + bf16", "gap16_bf16": "gap16 + bf16"}
    lines, head = [], []
    for row in sorted(read_csv(RESULTS / "cpu" / "patches.csv"), key=lambda row: float(row["rate"])):
        more = {f"{each}_deflated": f"{each}, {row['deflated_by']}" for each in ("gap16", "xor")}
        speeds = {f"{each}_gb_per_s": f"{each}, GB/s" for each in ("encode", "apply", "digest", "copy")}
        head = ["rate", "changed", *(bits | more).values(), "dense / patch", *speeds.values()]
        shown = [row["rate"], f"{float(row['changed']):.2%}", *(row[each] for each in bits | more)]
        lines.append([*shown, row["dense_over_patch"], *(row[each] for each in speeds)])
    return markdown_of_cells(head, lines)


def compressors_page() -> str:
    """The reference page: of every method the class, then the docstring of its module, with the wire format."""
    parts = [
        "<!-- written by `make tables` -->",
        "# Compressors",
        "Every compressor with its fields, its wire format, and an example worked out by hand.\n"
        "[Operators](../operators.md) compares them in a table.",
    ]
    for name, cls in _classes():
        module = f".. automodule:: {cls.__module__}\n   :no-members:\n   :no-index:"
        parts += [f"## {name}", f"```{{eval-rst}}\n{module}\n\n.. autoclass:: gckernels.{name}\n```"]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """The text of every file that has generated parts, as it should be."""
    measured = FOLDER / "measurements"
    times, trained = (read_csv(RESULTS / "cpu" / f"{name}.csv") for name in ("time_to_accuracy", "convergence"))
    timed = [row for row in times if row["rate"] == training_tables.RATE]  # updates have a table of their own
    return {
        FOLDER / "operators.md": _with_part(FOLDER / "operators.md", operators_table(), entries_table()),
        FOLDER / "reference" / "compressors.md": compressors_page(),
        FOLDER / "kernels.md": _with_part(FOLDER / "kernels.md", pipes.markdown(pipes.read_table(PIPES))),
        FOLDER / "design" / "patches.md": _with_part(FOLDER / "design" / "patches.md", patches_table()),
        FOLDER / "lanes.svg": svg(),
        measured / "steps.md": _with_part(measured / "steps.md", "\n\n".join(step_tables.all_tables())),
        measured / "auto.md": _with_part(measured / "auto.md", auto_tables.steps_table(), auto_tables.choices_table()),
        measured / "accuracy.md": _with_part(
            measured / "accuracy.md",
            training_tables.accuracy_table(trained),
            training_tables.training_table(timed, trained),
        ),
        measured / "updates.md": _with_part(
            measured / "updates.md",
            updates_tables.accuracy_table(400, 3e-3, 0.95, only=updates_tables.FEW),
            updates_tables.accuracy_table(400, 3e-3, 0.999),
            updates_tables.larger_table(),
            updates_tables.best_table(),
            updates_tables.steps_table(),
            updates_tables.times_table(times),
        ),
        measured / "predictions.md": _with_part(
            measured / "predictions.md",
            prediction_tables.predictions_table(),
        ),
        measured / "kernels_on_cpu.md": _with_part(measured / "kernels_on_cpu.md", kernel_tables.compressors_table()),
        FOLDER / "howto" / "fsdp.md": _with_part(
            FOLDER / "howto" / "fsdp.md",
            sharded_tables.predictions_table(),
            sharded_tables.steps_table(),
            sharded_tables.accuracy_table(),
        ),
        FOLDER.parent / "README.md": _with_part(FOLDER.parent / "README.md", step_tables.readme_table()),
    }


def _with_part(path: Path, *parts: str) -> str:
    """The text of a page with ``parts`` in the place of its generated parts."""
    place = r"(?<=<!-- written by `make tables` -->\n\n).*?(?=\n\n<!-- end -->)"
    left = iter(parts)
    text, found = re.subn(place, lambda _: next(left), path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found == len(parts), path
    return text


def _classes() -> list[tuple[str, type[gckernels.Compressor]]]:
    """The methods of the package, without those that others have registered."""
    methods = gckernels.COMPRESSORS.items()
    return sorted((name, cls) for name, cls in methods if cls.__module__.startswith("gckernels."))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path in console.PAGES:
        path.write_text(console.page_with_outputs(path), encoding="utf-8")
