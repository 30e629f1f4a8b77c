"""What messages of torch.amp have to name, each with its spellings: how their sentences are worded is no promise."""

from __future__ import annotations

UNSCALED = "unscale_|unscale|unscaled|unscaling"
STEPPED = "step|steps|stepped|stepping"
SCALED = "scale|scaled|scaling"
FP16 = "fp16|float16|half"
FOUND_INF = "found_inf|grad_scale|grad_scaler"
