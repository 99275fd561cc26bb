"""Traces of tiny Megatron models under every layout, recorded once per test session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks import environment

__all__ = ["ROOT", "record_all"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).resolve().parent / "record_gpt.py"

_MOE: dict[str, Any] = {"gpt": {"moe": True}, "weights": {"moe": True}}
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_NO_WEIGHTS = {"trace": {"weights": False}}


def _moe(**gpt: Any) -> dict[str, Any]:
    return {**_MOE, "gpt": {"moe": True, **gpt}}


ONE: dict[str, dict[str, Any]] = {
    "dense1": {"trace": {"dump": ["embedding", "layers.*.residual"]}},
    "rows1": {"trace": {"weights": "rows"}},
    "llama1": {"gpt": {"qk_norm": False}, "weights": {"qk_norm": False}},
    "groups1": {"gpt": {"groups": 2}, "weights": {"groups": 2}},
    "moe1": {**_MOE, "trace": {"dump": ["embedding", "layers.*.residual"]}},
    "data1": {"data": [0, 1]},
    "moe_data1": {**_MOE, "data": [0, 1]},
    "wrapped1": {"wrap": True},
    "other_rotary_base": {"gpt": {"rotary_base": 50000}, **_NO_WEIGHTS},
    "qkv_not_regrouped": {"load": {"regroup": False}, **_NO_WEIGHTS},
    "experts_shifted": {**_MOE, "load": {"expert_offset": 1}, **_NO_WEIGHTS},
    "other_experts": {**_MOE, "router_seed": 1, **_NO_WEIGHTS},
    "nudged1": {"data": [0, 1], "trace": {"perturb_ulps": 1}},
    "softmax_first": _moe(moe_router_pre_softmax=True),
    "collected1.safetensors": {"collect": {}},
    "recompute1": {"train": True, "gpt": _RECOMPUTE},
}
TWO: dict[str, dict[str, Any]] = {
    "tp2": {"gpt": {"tp": 2}},
    "rows_tp2": {"gpt": {"tp": 2}, "trace": {"weights": "rows"}},
    "tp2_sp": {"gpt": {"tp": 2, "sequence_parallel": True}},
    "llama_tp2": {"gpt": {"tp": 2, "qk_norm": False}, "weights": {"qk_norm": False}},
    "moe_tp2": _moe(tp=2),
    "moe_tp2_sp": _moe(tp=2, sequence_parallel=True),
    "moe_tp2_sp_ep2": _moe(tp=2, sequence_parallel=True, ep=2),
    "moe_allgather": _moe(tp=2, sequence_parallel=True, dispatcher="allgather"),
    "moe_dp2_ep2": _moe(ep=2),
    "dp2": {},
    "pp2": {"gpt": {"pp": 2}},
    "recompute_tp2_sp": {"train": True, "gpt": {"tp": 2, "sequence_parallel": True, **_RECOMPUTE}},
    "padded_tp2": {"gpt": {"tp": 2, "padded_vocabulary": 320}, "vocabulary": 256},
    "padding_only": {"gpt": {"tp": 2, "padded_vocabulary": 512}, "vocabulary": 256},
    "scores_of_loss": {"gpt": {"tp": 2}, "scores": "loss"},
    "scores_of_shard": {"gpt": {"tp": 2}, "scores": "shard"},
    "collected_tp2.safetensors": {"gpt": {"tp": 2}, "collect": {}},
    "collected_tp2_sp.safetensors": {"gpt": {"tp": 2, "sequence_parallel": True}, "wrap": True, "collect": {}},
    "collected_padded_tp2.safetensors": {"gpt": {"tp": 2, "padded_vocabulary": 512}, "collect": {"vocabulary": 256}},
    "collected_pp2": {"gpt": {"pp": 2}, "collect": {}},
    "qkv_not_regrouped_tp2": {"gpt": {"tp": 2}, "load": {"regroup": False}, **_NO_WEIGHTS},
    "fed_tp2_sp": {"gpt": {"tp": 2, "sequence_parallel": True}, "trace": {"feed": "dense1"}},
    "fed_moe_tp2_sp_ep2": {**_moe(tp=2, sequence_parallel=True, ep=2), "trace": {"feed": "moe1"}},
    "fed_pp2": {"gpt": {"pp": 2}, "trace": {"feed": "dense1"}, "refused": True},
    "against_tp2_sp": {"gpt": {"tp": 2, "sequence_parallel": True}, "trace": {"against": "dense1"}},
    "against_pp2": {"gpt": {"pp": 2}, "trace": {"against": "dense1"}},
    "planned_tp2_sp": {"gpt": {"tp": 2, "sequence_parallel": True}, "plan_of": ["dense1", "tp2_sp"]},
    "planned_pp2": {"gpt": {"pp": 2}, "plan_of": ["dense1", "other_rotary_base"], "plan_layer": 1},
    "pinned_moe_tp2_sp_ep2": {**_moe(tp=2, sequence_parallel=True, ep=2), "trace": {"pin": {"*.moe.topk_ids": "moe1"}}},
    "pinned_softmax_first": {**_moe(tp=2, moe_router_pre_softmax=True), "trace": {"pin": {"*.moe.topk_ids": "other_experts"}}},
    "nudged_tp2_sp": {"gpt": {"tp": 2, "sequence_parallel": True}, "trace": {"perturb_ulps": 1}},
    "nudged_dp2": {"trace": {"perturb_ulps": 1}},
    "experts_shifted_ep2": {**_moe(tp=2, sequence_parallel=True, ep=2), "load": {"expert_offset": 1}},
}
FOUR: dict[str, dict[str, Any]] = {
    "groups_tp4": {"gpt": {"groups": 2, "tp": 4}, "weights": {"groups": 2}},
    "moe_tp2_ep2_dp2": _moe(tp=2, sequence_parallel=True, ep=2),
}


def record_all(folder: Path) -> Path:
    """Record every case into ``folder``, under its name. A failure is an assertion with the end of what was printed."""
    layouts = {
        size: [{**case, "out": str(folder / name)} for name, case in cases.items()] for size, cases in ((1, ONE), (2, TWO), (4, FOUR))
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), json.dumps(layouts)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return folder
