"""A gradient watch for the figure that people keep: loss and norm as curves, the norms of layers over steps as a
map."""

from __future__ import annotations

from typing import Any

from nbdebug.views.chart import FAULT, VALUES
from nbdebug.views.watch import PALETTE, Watched
from nbdebug.views.watch_chart import MARKS, PANELS, SECOND
from nbdebug.views.words import clip, number

INK, FAINT = "#808080", "#a0a0a0"


def tall(seen: Watched) -> float:
    """Inches that the picture wants."""
    panels = sum(any(name in dict(seen.curves) for name in names) for names in PANELS)
    return 0.6 + 1.5 * panels + (max(1.6, 0.6 + 0.2 * len(seen.layers)) if seen.layers else 0.3)


def draw(figure: Any, seen: Watched) -> None:
    """Draw into a figure or a part of one."""
    known = dict(seen.curves)
    panels = [[(name, known[name]) for name in names if name in known] for names in PANELS]
    panels = [curves for curves in panels if curves]
    ratios = [1.5] * len(panels) + ([max(1.6, 0.6 + 0.2 * len(seen.layers))] if seen.layers else [])
    rows = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    for axes, curves in zip(rows, panels):
        _curves(axes, curves, seen)
        what = MARKS.get(curves[0][0], "")
        if steps := {"clipped": seen.clipped, "skipped": seen.skipped}.get(what):
            axes.plot(steps, [-0.04] * len(steps), "|", color=INK, markersize=6, clip_on=False)
            axes.annotate(
                f"| {what} ({number(len(steps))} of the steps drawn)",
                (1, 1.0),
                xycoords="axes fraction",
                ha="right",
                va="bottom",
                fontsize=8.5,
                color=INK,
            )
    if seen.layers:
        _map(figure, rows[-1], seen)
    whole = [value for value, _ in seen.across.ticks(8) if value == int(value)]
    rows[-1].set_xticks(whole, [number(int(value)) for value in whole])
    rows[-1].set_xlim(seen.across.low - 0.5, seen.across.high + 0.5)
    rows[-1].set_xlabel("step", fontsize=8.5, color=INK)


def _curves(axes: Any, curves: list[Any], seen: Watched) -> None:
    _quiet(axes)
    scale = seen.scale([y for _, points in curves for _, y in points])
    for (name, points), colour, style in zip(curves, (VALUES, SECOND), ("-", "--")):
        axes.plot(
            [x for x, _ in points],
            [scale.at(y) for _, y in points],
            style,
            color=colour,
            linewidth=1.2,
            label=name,
            marker="o" * (len(points) == 1) or None,
        )
    ticks = scale.ticks()
    axes.set_yticks([scale.at(value) for value, _ in ticks], [said for _, said in ticks])
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.8)
    axes.set_ylim(-0.04, 1.04)
    axes.set_title(curves[0][0] + " (logarithmic)" * scale.log, loc="left", fontsize=9.5, color=INK, pad=6)
    axes.tick_params(axis="x", length=0)
    if len(curves) > 1:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="upper right")


def _map(figure: Any, axes: Any, seen: Watched) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgba

    _quiet(axes)
    low, high = seen.span
    cells = [[to_rgba(seen.colour(value) or "none") for value in row] for _, row in seen.layers]
    half = (seen.steps[-1] - seen.steps[0]) / max(1, len(seen.steps) - 1) / 2 or 0.5
    axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        extent=(seen.steps[0] - half, seen.steps[-1] + half, len(seen.layers) - 0.5, -0.5),
    )
    apart = max(1, len(seen.layers) // 40)
    places = [i for i, (name, _) in enumerate(seen.layers) if i % apart == 0 or name in seen.bad]
    axes.set_yticks(places, [clip(seen.layers[i][0], 36) for i in places], parse_math=False)
    for label, place in zip(axes.get_yticklabels(), places):
        label.set_color(FAULT if seen.layers[place][0] in seen.bad else INK)
        label.set_fontsize(8)
    said = "; red: not finite" * bool(seen.bad) + "; grey: exactly zero" * any("zero" in row for _, row in seen.layers)
    axes.set_title(f"gradient norm of each layer{said}", loc="left", fontsize=9.5, color=INK, pad=6)
    from matplotlib.cm import ScalarMappable

    edges = [low + (high - low) * i / len(PALETTE) for i in range(len(PALETTE) + 1)]
    colours = ScalarMappable(BoundaryNorm(edges, len(PALETTE)), ListedColormap(PALETTE))
    bar = figure.colorbar(colours, ax=axes, pad=0.01, aspect=30, ticks=[edges[0], edges[len(edges) // 2], edges[-1]])
    bar.ax.set_yticklabels([f"$10^{{{edges[i]:.1f}}}$" for i in (0, len(edges) // 2, -1)])
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
    bar.outline.set_visible(False)


def _quiet(axes: Any) -> None:
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=3, color=FAINT)
