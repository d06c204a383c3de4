"""Draw ``lanes.svg``: what three buckets do on the lanes of one rank, over time. Written by ``make tables``.

A schematic, with durations that were chosen for it. ``gckernels.sync.record_timeline`` records a real one.
"""

from __future__ import annotations

STAGES = (  # lane, what it does, duration
    ("backward", "backward", 2.0),
    ("compute-0", "encode", 0.8),
    ("communicate-0", "all-to-all", 1.9),
    ("compute-1", "merge, encode", 1.6),
    ("communicate-1", "all-gather", 1.9),
    ("compute-2", "decode", 0.8),
)
COLOURS = ("#2a5fa5", "#c8602a", "#4a8a4f")  # a bucket each
UNIT, ROW, LEFT, TOP = 62, 34, 122, 26  # pixels: of a duration of 1, of a lane, around the lanes


def bars() -> list[tuple[int, int, float, float]]:
    """``(bucket, lane, start, end)`` of every stage: after the one before it, and when its lane is free."""
    free = [0.0] * len(STAGES)
    found = []
    for bucket in range(len(COLOURS)):
        ready = 0.0
        for lane, (_, _, duration) in enumerate(STAGES):
            start = max(ready, free[lane])
            ready = free[lane] = start + duration
            found.append((bucket, lane, start, ready))
    return found


def svg() -> str:
    """The picture as text."""
    last = max(end for _, _, _, end in bars())
    width, height = round(LEFT + last * UNIT + 12), TOP + len(STAGES) * ROW + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Stages of three buckets on the lanes of one rank, over time</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for bucket, colour in enumerate(COLOURS):
        x = LEFT + bucket * 90
        parts.append(f'<rect x="{x}" y="7" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="17" fill="#222222">bucket {bucket}</text>')
    for lane, (name, _, _) in enumerate(STAGES):
        y = TOP + lane * ROW
        parts.append(f'<text x="{LEFT - 10}" y="{y + 21}" text-anchor="end" fill="#222222">{name}</text>')
        parts.append(f'<path d="M{LEFT} {y + ROW}H{width - 10}" stroke="#dddddd"/>')
    for bucket, lane, start, end in bars():
        x, y, wide = LEFT + start * UNIT, TOP + lane * ROW + 5, (end - start) * UNIT - 2
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{ROW - 10}" fill="{COLOURS[bucket]}" rx="2"/>'
        )
        parts.append(
            f'<text x="{x + wide / 2:.0f}" y="{y + 16}" text-anchor="middle" fill="#ffffff">{STAGES[lane][1]}</text>'
        )
    y = TOP + len(STAGES) * ROW + 18
    parts.append(f'<text x="{width - 10}" y="{y}" text-anchor="end" fill="#222222">time &#8594;</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
