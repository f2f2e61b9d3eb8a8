"""The batches of a step, one for each data rank, and the rows of each rank."""

from collections.abc import Sequence

from engine.core.batch import DataShare, ForwardBatch, ForwardMode, idle_batch
from engine.sampling.sampler import wanted_by_row

RankBatches = tuple[ForwardBatch | None, ...]  # the batch of each data rank


def plan_step(own: Sequence[ForwardBatch | None]) -> RankBatches:
    """Return the batches that the data ranks run in one step, given the batch of each.

        a batch           itself; a PREBUILT one takes part in others' forwards once, with its
                      `inner_idle`
        none              nothing, or an idle batch if another rank has tokens

    So a pool with one data rank never runs an idle batch. Every batch gets the shares of all ranks,
    for layers that all of them divide. The shares are never absent.
    """
    shares = tuple(_share_of(batch, names_adapters=len(own) > 1) for batch in own)
    is_needed = any(share.tokens for share in shares)
    step = tuple(idle_batch() if batch is None and is_needed else batch for batch in own)
    for batch in step:
        if batch is not None:
            batch.shares = shares
    return step


def _share_of(batch: ForwardBatch | None, *, names_adapters: bool) -> DataShare:
    if batch is None or batch.mode in (ForwardMode.PREBUILT, ForwardMode.IDLE):
        return DataShare(0, 0)
    wanted = [*map(len, wanted_by_row(batch))]
    if not batch.adapters or not names_adapters:
        return DataShare(batch.num_tokens, sum(wanted))
    return DataShare(
        batch.num_tokens,
        sum(wanted),
        tuple(zip(batch.adapters, batch.query_lens, strict=True)),
        tuple(zip(batch.adapters, wanted, strict=True)),
    )


def rows_per_rank(count: int, num_ranks: int) -> int:
    """Return the rows of each rank, after padding `count` to a multiple of `num_ranks`.

    A stage with one data rank never pads (case S3-2): all of its ranks have all rows after
    attention, so no rows are gathered (`models.decoder`).
    """
    return -(-count // num_ranks)
