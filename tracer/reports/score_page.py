"""Score comparisons and update checks as pages: the same blocks as in the terminal, the decision drawn, two charts.

The decision is drawn as its flat path: every question in order, what was answered, and the branches that it can lead to. The
branch that was taken is marked in words and by its border, never by colour alone.
"""

from __future__ import annotations

from tracer.errors import ScoreError
from tracer.reports.page import Flow, FlowStep, Section, render_page
from tracer.reports.score_charts import distribution_chart, position_chart
from tracer.reports.score_view import (
    pairs_table,
    places_table,
    refits_table,
    requests_table,
    score_facts,
    siblings_list,
    slices_table,
    update_facts,
    update_table,
    worst_table,
)
from tracer.reports.view import Block, Facts, Headline, Items
from tracer.scores.decision import LAST, QUESTIONS
from tracer.scores.results import Decision, ScoreResult, ScoreVerdict, UpdateResult

__all__ = ["refusal_page", "score_page", "update_page"]

_TONES = {ScoreVerdict.AGREE: "good", ScoreVerdict.DIFFERENT: "bad", ScoreVerdict.COULD_NOT_TELL: "open"}


def score_page(result: ScoreResult) -> str:
    """The page of ``tracer scores compare``. Raises UsageError (extra-missing)."""
    headline = Headline(result.headline, _TONES[result.verdict])
    return render_page(f"tracer scores: {result.headline}", headline, result.verdict.value, _sections(result))


def _sections(result: ScoreResult) -> list[Section]:
    decision = result.decision
    sections = [
        Section("verdict", "Verdict", (Facts(score_facts(result)),)),
        Section("decision", "Decision", caption=_PATH_RULE, flow=_flow(decision)),
        Section("pairs", "Pairs", (pairs_table((*result.repeats, *result.pairs)),), _PAIRS_RULE),
    ]
    for chart in (distribution_chart(result), position_chart(result)):
        if chart is not None:
            sections.append(Section(chart.name, chart.title, caption=chart.caption, chart=chart))
    for pair in result.pairs:
        if pair.worst:
            caption = f"The {len(pair.worst)} valid tokens that are furthest apart."
            sections.append(Section(f"worst-{pair.name}", f"Worst tokens of {pair.name}", (worst_table(pair, len(pair.worst)),), caption))
    for pair in result.pairs:
        if pair.largest > 0:
            folded = f"all {len(pair.positions)} places of {pair.name}"
            sections.append(Section(f"places-{pair.name}", f"Places of {pair.name}", (places_table(pair, everything=True),), folded=folded))
    if result.refits:
        matched = sum(refit.matched for refit in result.refits)
        caption = (
            f"{len(result.refits)} causes were tried, {matched} explain the difference; each was tested on tokens it was not fitted on."
        )
        sections.append(Section("refits", "Causes tried", (refits_table(result.refits),), caption))
    if result.sequences:
        caption = f"Of the pair that decided, worst first; {result.sequences_not_shown} more requests are not listed."
        folded = f"{len(result.sequences)} requests" if len(result.sequences) > _UNFOLDED else ""
        sections.append(Section("requests", "Requests", (requests_table(result, everything=True),), caption, folded=folded))
    if result.slices:
        sections.append(Section("slices", "Workers and groups", (slices_table(result),), _SLICES_RULE))
    if result.siblings:
        sections.append(Section("siblings", "Siblings", (siblings_list(result),), _SIBLINGS_RULE))
    sections.append(_omissions(result))
    if result.log_lines:
        sections.append(Section("log", "Log lines", (Items("log", result.log_lines),), folded=f"{len(result.log_lines)} lines"))
    return sections


_UNFOLDED = 20
_PATH_RULE = "Questions from the top; the first that leads to a branch ends the path. What was not asked is said so."
_PAIRS_RULE = (
    "All numbers in nats over valid tokens, except probability_mae, which is a difference of probabilities: the two never stand for one "
    "another. k3 is the mean of exp(d) - 1 - d with d the later score minus the earlier. Rows in bold are apart."
)
_SLICES_RULE = "The pair that decided, by worker of either score and by group. Rows in bold are apart while the tokens elsewhere are not."
_SIBLINGS_RULE = "Requests with one prompt and one policy must have equal scores over the response prefix that they share."


def _flow(decision: Decision) -> Flow:
    """Every question with its exits; the last one asked is where the path leaves."""
    answered = {step.question: step for step in decision.path if step.question != LAST}
    last = next((step.question for step in reversed(decision.path) if step.question != LAST), "")
    steps = []
    for question in QUESTIONS:
        step = answered.get(question.text)
        exits = tuple((when, branch.value, question.text == last and branch is decision.branch) for when, branch in question.exits)
        said = "" if step is None else step.answer
        steps.append(FlowStep(question.text, said, "" if step is None else step.numbers, exits))
    side = f" ({decision.side})" if decision.side else ""
    cause = f": {decision.cause.value}" if decision.cause else ""
    return Flow(tuple(steps), f"{decision.branch.value}{side}{cause}", decision.next_step)


def _omissions(result: ScoreResult) -> Section:
    """What no number covers, with the reason."""
    counts = result.counts
    lines = [f"{counts.masked} response tokens: the mask leaves them out"] if counts.masked else []
    if counts.other_policy:
        lines.append(f"{counts.other_policy} valid tokens: sampled by another policy than the one asked for")
    lines += [f"request {request}: no valid token" for request in counts.without_tokens]
    present = {score.score.value for score in result.scores}
    lines += [f"score {name}: not given" for name in ("A", "B0", "B1", "C0", "C1") if name not in present]
    lines += [f"not proven: {text}" for text in result.decision.not_proven]
    caption = "Nothing passes by absence. A comparison of other requests, ids, masks, policies or definitions is refused, never cut to fit."
    return Section("omissions", "Not compared, not proven", (Items("omissions", tuple(lines) or ("nothing was left out",)),), caption)


def update_page(result: UpdateResult) -> str:
    """The page of ``tracer scores update``. Raises UsageError (extra-missing)."""
    headline = Headline(result.headline, _TONES[result.verdict])
    sections = [Section("verdict", "Verdict", (Facts((*update_facts(result), ("next", result.next_step))),))]
    sections.append(Section("pairs", "B-C before and after", (update_table(result),), "Scores of one saved batch, in nats."))
    for when, pair in (("before", result.before), ("after", result.after)):
        if pair is not None and pair.worst:
            title = f"Worst tokens {when} the update"
            sections.append(Section(f"worst-{when}", title, (worst_table(pair, len(pair.worst)),), f"Of {pair.tokens} valid tokens."))
    return render_page(f"tracer scores update: {result.headline}", headline, result.verdict.value, sections)


def refusal_page(error: ScoreError) -> str:
    """The page of a comparison that was refused: the reason, where, and what to do. Raises UsageError (extra-missing)."""
    said = (("reason", error.what), ("where", error.where), ("expected", error.expected), ("found", error.found), ("next", error.remedy))
    blocks: tuple[Block, ...] = (Facts((("code", error.code.value), *((label, text) for label, text in said if text))),)
    text = f"Refused: {error.what}"
    caption = "Nothing was compared, so there is no number here: it would have meant nothing."
    return render_page(f"tracer scores: {text}", Headline(text, "open"), "refused", [Section("verdict", "Why", blocks, caption)])
