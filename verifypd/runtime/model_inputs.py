"""What a model reads of a padded pass, token ids and layout: in one launch, where torch makes twenty. Knows slots and
rows; nothing of models.
"""

from __future__ import annotations

import torch

from verifypd.attention.base import PassLayout
from verifypd.kernels.launch import launch_early
from verifypd.runtime.inputs import BlockTables, Slots
from verifypd.runtime.passes import ModelInputs, PassInputs
from verifypd.runtime.triton_model_inputs import prepare_rows

ROWS_OF_A_PROGRAM = 128  # and spans


def model_inputs(inputs: PassInputs, slots: Slots, tables: BlockTables, depth: int = 0) -> ModelInputs:
    """The pass of these inputs; from depth 1 on the step behind it that reads the token drafted at `depth` − 1.

    The same to the bit as `PassInputs.layout` or `step`, and their `ids`.
    """
    spans, device = inputs.key.spans if depth else inputs.key.all_spans, inputs.data.device
    rows = spans if depth else inputs.key.rows
    starts = torch.empty(spans, dtype=torch.int64, device=device)
    positions, write_index, ids = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
    prepare_rows[(-(-max(spans, rows) // ROWS_OF_A_PROGRAM),)](
        inputs.slots,
        inputs.own,
        inputs.back,
        inputs.given,
        inputs.row_span,
        inputs.within,
        inputs.depth,
        slots.lengths,
        tables.data,
        slots.lengths if tables.first is None else tables.first,
        slots.tokens,
        slots.drafts,
        starts,
        positions,
        write_index,
        ids,
        spans,
        rows,
        depth,
        slots.drafts.shape[1],
        tables.data.stride(0),
        slots.tokens.stride(0),
        slots.drafts.stride(0),
        BLOCK_SIZE=tables.block_size,
        BEGINS=tables.first is not None,
        STEP=depth > 0,
        BLOCK=ROWS_OF_A_PROGRAM,
        num_warps=4,
        **launch_early(device),
    )
    layout = PassLayout(
        span_rows=(1,) * spans if depth else inputs.bounds,
        contexts=(slots.capacity,) * spans,
        max_context=slots.capacity,
        row_offsets=inputs.each if depth else inputs.offsets,
        row_span=inputs.each[:-1] if depth else inputs.row_span,
        slots=inputs.slots[:spans],
        starts=starts,
        positions=positions,
        write_index=write_index,
        block_table=tables.data,
        block_size=tables.block_size,
        first=tables.first,
    )
    return ModelInputs(ids, layout)
