"""Look rows up and pool them: all features of a row space in one call.

B samples, F features, D weights in a row, W floats in a record (weights, then optimizer state), V
ids, S columns of the output, in which row spaces of several dims may lie side by side. Weights may
be bfloat16: records come in the weights' type (:data:`~pibroch.kernels.arrays.Stored`). Bags are
feature-major: bag ``f * B + b`` holds ``row_ids[offsets[bag] : offsets[bag + 1]]``.
"""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Array, Ints, Records, RowIds, Stored
from pibroch.kernels.gather_pool import naive, numba
from pibroch.kernels.memory import FLOATS_PER_LINE, can_stream
from pibroch.kernels.operation import Operation

__all__ = ["first_absent", "gather_pool", "gradient_sources", "pooling_scale", "resolve_rows"]

STREAM_BYTES = 8 << 20  # of an output that caches do not keep until it is read
BAGS_PER_THREAD = 8192  # bags below which a further thread is not worth waking to look at their ids


@Operation
def resolve_rows(values: Ints, offsets: Ints, first_row: Ints, num_rows: Ints, out: Ints) -> int:
    """Write the row id of each value ``[V]`` to ``out``.

    Args:
        values: ids local to each feature's table.
        offsets: ``[F * B + 1]``.
        first_row: ``[F]``, of each feature's table in the row space.
        num_rows: ``[F]``, of each feature's table.
        out: ``[V]``.

    Returns:
        The position of the first id out of range, or -1.
    """
    bad = parallel.run(
        numba.resolve_rows,
        len(offsets) - 1,
        values,
        offsets,
        first_row,
        num_rows,
        out,
        grain=BAGS_PER_THREAD,
    )
    return min((position for position in bad if position >= 0), default=-1)


@Operation
def first_absent(values: Ints, offsets: Ints, num_rows: Ints) -> int:
    """The position of the first id out of range, or -1; arguments as in :func:`resolve_rows`."""
    bad = parallel.run(
        numba.first_absent, len(offsets) - 1, values, offsets, num_rows, grain=BAGS_PER_THREAD
    )
    return min((position for position in bad if position >= 0), default=-1)


@Operation
def gather_pool(
    records: Stored,
    rows: RowIds,
    first_rows: Ints,
    offsets: Ints,
    scale: Records,
    first_columns: Ints,
    dim: int,
    unit: int,
    out: Records,
) -> None:
    """Pool the rows of each bag into D columns of ``out``.

    Args:
        records: ``[rows, W]``.
        rows: ``[V]``, in order of the bags.
        first_rows: ``[F]``, from which each feature's are counted; empty for 0.
        offsets: ``[F * B + 1]``.
        scale: ``[V]``, factor of each row in its bag's sum; empty for ones.
        first_columns: ``[F]``, where each feature's columns begin.
        dim: D.
        unit: what all features' first columns and D are multiples of.
        out: ``[B, S]``.
    """
    assert len(offsets) - 1 == len(first_columns) * len(out), "a bag for each feature and sample"
    is_large = unit % FLOATS_PER_LINE == 0 and out.nbytes >= STREAM_BYTES
    stream = is_large and can_stream(out)
    parallel.run(
        numba.gather_pool,
        len(offsets) - 1,
        records,
        rows,
        first_rows,
        offsets,
        scale,
        first_columns,
        dim,
        out,
        stream,
    )


@Operation
def gradient_sources(offsets: Ints, first_rows: Ints, rows_per_sample: int, out: Array) -> None:
    """Write for each position the row of the gradients with which its own begins.

    Args:
        offsets: ``[F * B + 1]``.
        first_rows: ``[F]``, of each feature among a sample's.
        rows_per_sample: of the gradients ``[B * rows_per_sample, unit]``.
        out: int32 ``[V]``.
    """
    numba.gradient_sources(offsets, first_rows, rows_per_sample, out)


@Operation
def pooling_scale(offsets: Ints, weights: Records, mean_of_feature: Array, out: Records) -> None:
    """Write the factor of each position in its bag's sum.

    It is the position's weight, over the bag's length where the feature's bags are averaged.

    Args:
        offsets: ``[F * B + 1]``.
        weights: ``[V]``; empty for ones.
        mean_of_feature: bool ``[F]``.
        out: ``[V]``.
    """
    numba.pooling_scale(offsets, weights, mean_of_feature, out)


resolve_rows.register("naive", naive.resolve_rows)
first_absent.register("naive", naive.first_absent)
gather_pool.register("naive", naive.gather_pool)
gradient_sources.register("naive", naive.gradient_sources)
pooling_scale.register("naive", naive.pooling_scale)
