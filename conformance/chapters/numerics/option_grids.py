"""Calls of ops with many options, over all combinations of these, on small operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...oracles.relations.programs import Program, program
from .drawn_ops import Draws


def combinations(**options: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield each combination of the values of these options."""
    for chosen in itertools.product(*options.values()):
        yield dict(zip(options, chosen, strict=True))


def resizing(d: Draws) -> Iterator[Program]:
    """Yield resizings of pictures, along each axis to a larger, the same and a smaller size."""
    for sizes in itertools.product((3, 6, 11), repeat=2):
        for mode, aligned, smooth in itertools.product(("bilinear", "bicubic"), (False, True), (False, True)):
            options = {"mode": mode, "align_corners": aligned, "antialias": smooth}
            yield program(f"{mode} to {sizes}", F.interpolate, (d.normal(2, 3, 6, 6),), {"size": sizes, **options})
        for mode in ("nearest", "nearest-exact", "area"):
            yield program(f"{mode} to {sizes}", F.interpolate, (d.normal(2, 3, 6, 6),), {"size": sizes, "mode": mode})
    for factors in itertools.product((0.5, 1.0, 1.6), repeat=2):
        for used, mode, aligned in itertools.product((False, True), ("bilinear", "bicubic"), (False, True)):
            options = {"scale_factor": factors, "recompute_scale_factor": used, "align_corners": aligned}
            yield program(f"{mode} by {factors}", F.interpolate, (d.normal(2, 2, 5, 7),), {"mode": mode, **options})
    for factor, used, mode in itertools.product((0.25, 0.5, 0.6, 2.0), (False, True), ("nearest", "nearest-exact")):
        options = {"scale_factor": factor, "recompute_scale_factor": used, "mode": mode}
        yield program(f"{mode} by {factor}", F.interpolate, (d.normal(2, 3, 8, 8),), options)
    for sizes in itertools.product((2, 4, 7), repeat=3):
        options = {"size": sizes, "mode": "trilinear", "align_corners": d.yes()}
        yield program(f"trilinear to {sizes}", F.interpolate, (d.normal(2, 2, 4, 4, 4),), options)
    for mode, sizes in itertools.product(("nearest", "nearest-exact", "area"), ((2, 4, 7), (7, 2, 4), (4, 7, 8))):
        options = {"size": sizes, "mode": mode}
        yield program(f"{mode} to {sizes}, volumes", F.interpolate, (d.normal(2, 2, 4, 4, 4),), options)
    for mode, size in itertools.product(("nearest", "nearest-exact", "area", "linear"), (3, 6, 11)):
        yield program(f"{mode} to {size}, signals", F.interpolate, (d.normal(2, 3, 6),), {"size": size, "mode": mode})


def bags(d: Draws) -> Iterator[Program]:
    """Yield bags of rows of a table whose row for padding is like any other."""
    index, ends = torch.tensor([0, 2, 2, 3, 1, 4, 0, 3, 2]), torch.tensor([0, 2, 2, 6, 9])
    for chosen in combinations(mode=("sum", "mean", "max"), padding_idx=(None, 2, -2), weighted=(False, True)):
        weighted = chosen.pop("weighted")
        if weighted and chosen["mode"] != "sum":
            continue
        for kind in ("rows", "offsets", "ends"):
            places = index.view(3, 3) if kind == "rows" else index
            options = {**chosen, "include_last_offset": kind == "ends"}
            starts = None if kind == "rows" else ends if kind == "ends" else ends[:-1]
            weights = d.positive(*places.shape) if weighted else None
            named = {"offsets": starts, "per_sample_weights": weights, **options}
            yield program(f"embedding_bag of {kind}", F.embedding_bag, (places, d.distinct(5, 7)), named)


def windows(d: Draws) -> Iterator[Program]:
    """Yield pools of pictures whose last windows are not full."""
    for options in combinations(
        stride=(1, 2, 3), padding=(0, 1), ceil_mode=(False, True), count_include_pad=(False, True), divisor=(None, 5)
    ):
        options["divisor_override"] = options.pop("divisor")
        yield program("avg_pool2d", F.avg_pool2d, (d.normal(2, 3, 8, 9), (2, 3)), options)
    for options in combinations(stride=(1, 2, 3), padding=(0, 1), dilation=(1, 2), ceil_mode=(False, True)):
        yield program("max_pool2d", F.max_pool2d, (d.distinct(2, 3, 8, 9), (2, 3)), options)
    for norm, stride, up in itertools.product((1.0, 2.0, 3.0), (1, 2, 3), (False, True)):
        named = {"stride": stride, "ceil_mode": up}
        yield program("lp_pool2d", F.lp_pool2d, (d.positive(2, 3, 8, 9), norm, (2, 3)), named)


def paddings(d: Draws) -> Iterator[Program]:
    """Yield signals, pictures and volumes that are made larger or smaller at each of their ends."""
    for rank, mode in itertools.product((1, 2, 3), ("constant", "reflect", "replicate", "circular")):
        for ends in itertools.product((0, 2, -1) if mode == "constant" else (0, 2), repeat=2):
            pad = (*ends, *((1, 0) * (rank - 1)))
            options = {"mode": mode, **({"value": 0.5} if mode == "constant" else {})}
            yield program(f"pad of {rank}, {mode}", F.pad, (d.normal(2, 3, *(4, 5, 6)[:rank]), pad), options)


def _padded(x: Tensor, weight: Tensor, mode: str, padding: Any, **options: Any) -> Tensor:
    if mode == "zeros":
        return F.conv2d(x, weight, padding=padding, **options)
    return F.conv2d(F.pad(x, (padding,) * 4, mode), weight, **options)


def convolutions(d: Draws) -> Iterator[Program]:
    """Yield convolutions and transposed ones, in groups, with gaps and paddings."""
    given: tuple[Any, ...]
    for options in combinations(
        mode=("zeros", "reflect", "circular"), padding=(0, 1, 2), stride=(1, 2), dilation=(1, 2), groups=(1, 2)
    ):
        mode, padding = options.pop("mode"), options.pop("padding")
        weight = d.normal(4, 4 // options["groups"], 3, 2)
        yield program(f"conv2d, {mode}", _padded, (d.normal(1, 4, 7, 8), weight, mode, padding), options)
    for options in combinations(stride=(2, 3), padding=(0, 1), output_padding=(0, 1), dilation=(1, 2), groups=(1, 2)):
        given = (d.normal(1, 4, 4, 5), d.normal(4, 6 // options["groups"], 3, 2), d.maybe(d.normal(6)))
        yield program("conv_transpose2d", F.conv_transpose2d, given, options)
    # Of one tap, and of each channel alone: libraries have other ways for both.
    for options in combinations(stride=(1, 2, 3), groups=(1, 4)):
        width = 4 // options["groups"]
        yield program("conv2d of one tap", F.conv2d, (d.normal(2, 4, 6, 7), d.normal(4, width, 1, 1)), options)
        given = (d.normal(2, 4, 3, 4), d.normal(4, width, 1, 1))
        yield program("conv_transpose2d of one tap", F.conv_transpose2d, given, options)
    for channels, stride in itertools.product((8, 16, 24), (1, 2)):
        given = (d.normal(2, channels, 6, 7), d.normal(channels, 1, 3, 3))
        options = {"stride": stride, "padding": 1, "groups": channels}
        yield program("conv2d of channels alone", F.conv2d, given, options)


def attention(d: Draws) -> Iterator[Program]:
    """Yield attention with and without each of its arguments, where keys and queries differ in number or not."""
    given: tuple[Any, ...]
    for options in combinations(
        queries=(5, 8),
        masked=("", "numbers", "places", "numbers of heads"),
        scale=(None, 0.3),
        enable_gqa=(False, True),
    ):
        queries, masked = options.pop("queries"), options.pop("masked")
        heads = 2 if options["enable_gqa"] else 4
        mask = {
            "": None,
            "numbers": d.normal(queries, 8),
            "numbers of heads": d.normal(1, 4, queries, 8),
            "places": (d.normal(queries, 8) > -1).index_fill(1, torch.tensor(0), True),
        }
        given = (d.normal(1, 4, queries, 16), d.normal(1, heads, 8, 16), d.normal(1, heads, 8, 16), mask[masked])
        for causal in (False, True) if not masked else (False,):
            yield program("attention", F.scaled_dot_product_attention, given, {**options, "is_causal": causal})
    # Values of another size than keys, and one query of which keys and values have fewer heads, as in decoding.
    for size, causal in itertools.product((8, 24), (False, True)):
        given = (d.normal(2, 2, 5, 16), d.normal(2, 2, 8, 16), d.normal(2, 2, 8, size))
        yield program("attention", F.scaled_dot_product_attention, given, {"is_causal": causal})
    for keys, heads in itertools.product((8, 1024), (1, 2)):
        given = (d.normal(1, 4, 1, 16), d.normal(1, heads, keys, 16), d.normal(1, heads, keys, 16))
        yield program("attention", F.scaled_dot_product_attention, given, {"enable_gqa": True})
    # Kernels are chosen by the size of a head.
    for options in combinations(size=(32, 64, 80, 96, 128, 192, 256), is_causal=(False, True)):
        size = options.pop("size")
        given = tuple(d.normal(2, 2, length, size) for length in (5, 8, 8))
        yield program("attention", F.scaled_dot_product_attention, given, options)


def losses(d: Draws) -> Iterator[Program]:
    """Yield losses by classes with each of their options."""
    classes = torch.tensor([0, 3, 2, 2, 1, 4])
    for options in combinations(
        reduction=("none", "mean", "sum"), label_smoothing=(0.0, 0.2), ignore_index=(-100, 2), weighted=(False, True)
    ):
        options["weight"] = d.positive(5) if options.pop("weighted") else None
        yield program("cross_entropy", F.cross_entropy, (d.normal(6, 5), classes), options)
        if not options["label_smoothing"]:
            chosen = {name: value for name, value in options.items() if name != "label_smoothing"}
            given = (d.normal(2, 5, 3).abs().neg(), classes.view(2, 3))
            yield program("nll_loss of pictures", F.nll_loss, given, chosen)
    for options in combinations(reduction=("none", "mean", "sum"), weighted=(False, True), of_positives=(False, True)):
        options["weight"] = d.positive(5) if options.pop("weighted") else None
        options["pos_weight"] = d.positive(5) if options.pop("of_positives") else None
        given = (d.normal(6, 5), d.positive(6, 5) - 0.5)
        yield program("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, given, options)


GRIDS: Mapping[str, Callable[[Draws], Iterator[Program]]] = {
    "resizing": resizing,
    "bags": bags,
    "windows": windows,
    "paddings": paddings,
    "convolutions": convolutions,
    "attention": attention,
    "losses": losses,
}
"""Programs of float32 operands, by what they do."""
