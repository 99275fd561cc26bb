"""Score records of a toy engine: random logits with the noise of real ones, so that every right answer is known.

Numbers of the noise are those of published runs: about 0.009 nats between engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import Logits, ScoreInfo, ScoreName, ScoreRecord, make_score
from tracer.scores.results import ScoreResult
from tracer.scores.score_comparison import compare_scores

__all__ = ["ToyBatch", "make_batch", "refit_of"]

F64 = npt.NDArray[np.float64]


def log_softmax(z: F64) -> F64:
    """Over the last axis."""
    shifted = z - z.max(axis=-1, keepdims=True)
    scores: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return scores


@dataclass
class ToyBatch:
    """``logits_QRV`` are the trainer's; ``a``, ``b0`` ... are float64 (Q, R) and may be changed before ``records``."""

    ids: npt.NDArray[np.int64]
    prompt: int
    logits: F64
    scores: dict[str, F64]
    mask: npt.NDArray[np.bool_]
    info: dict[str, ScoreInfo] = field(default_factory=dict)

    @property
    def response(self) -> npt.NDArray[np.int64]:
        return self.ids[:, self.prompt :]

    def pick(self, full: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The response tokens' columns of (Q, R, V)."""
        return np.take_along_axis(full, self.response[..., None], axis=-1)[..., 0]

    def records(self, *, logits: bool = False, of: str = "C0") -> list[ScoreRecord]:
        """float32, as engines return them."""
        return [
            ScoreRecord(
                request=f"r{q}",
                ids=self.ids[q],
                prompt_length=self.prompt,
                mask=self.mask[q],
                group=f"g{q // 2}",
                scores={
                    ScoreName(name): make_score(values[q].astype(np.float32), self.info.get(name, ScoreInfo()))
                    for name, values in self.scores.items()
                },
                logits=Logits(ScoreName(of), np.arange(self.response.shape[1]), self.logits[q].astype(np.float32)) if logits else None,
            )
            for q in range(len(self.ids))
        ]

    def compare(self, *, logits: bool = False, **given: Any) -> ScoreResult:
        """Compare what the batch holds now."""
        return compare_scores(self.records(logits=logits), **given)


def make_batch(
    requests: int = 16, response: int = 48, vocabulary: int = 128, *, noise: float = 0.009, repeat: float = 0.0, seed: int = 0
) -> ToyBatch:
    """Honest scores of tokens sampled from the model. ``noise``, ``repeat``: logprob_mae between engines, and of B's repeats."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.standard_normal((requests, response, vocabulary))
    gumbel = generator.gumbel(size=logits.shape)
    ids = np.concatenate([generator.integers(0, vocabulary, (requests, 8)), (logits + gumbel).argmax(axis=-1)], axis=1)
    batch = ToyBatch(ids, 8, logits, {}, np.ones((requests, response), np.bool_))
    clean = batch.pick(log_softmax(logits))

    def noisy(size: float) -> F64:
        scores: F64 = np.minimum(clean + size * np.sqrt(np.pi / 2) * generator.standard_normal(clean.shape), -1e-6)
        return scores

    b0 = noisy(noise / np.sqrt(2)) if noise else clean
    b1 = b0 + repeat * np.sqrt(np.pi / 2) * generator.standard_normal(clean.shape) if repeat else b0
    batch.scores = {
        "A": noisy(noise / np.sqrt(2)) if noise else clean,
        "B0": b0,
        "B1": np.minimum(b1, -1e-6),
        "C0": noisy(noise / np.sqrt(2)) if noise else clean,
    }
    batch.scores["C1"] = batch.scores["C0"]
    return batch


def refit_of(result: ScoreResult, kind: Any) -> Any:
    """The matched refit of a kind."""
    return next(refit for refit in result.refits if refit.kind is kind and refit.matched)
