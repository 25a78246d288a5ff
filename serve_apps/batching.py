"""Continuous batching as vLLM's scheduler does it, reduced to token counts: who runs in a step, how long it takes.

Pure: may not import Ray, asyncio, a clock, or anything that does I/O; the caller says what time it is and waits out
each step. A step serves every decoding sequence one token and prefills at most `step_tokens` prompt tokens; it lasts
`timing.decode_step_s` of the decoding batch plus `timing.prefill_s` of the prompts' share. Admission is by (priority,
arrival), lower priority value first; nobody overtakes the head of the queue. When the KV cache is full the last in that
order is preempted: it loses its cache, waits, and is prefilled anew.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import count

from serve_apps.timing import Timing, decode_step_s

STEP_TOKENS = 8192


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request in the engine. Instants are the caller's; `to_prefill` counts tokens not in the KV cache yet."""

    request_id: str
    input_tokens: int
    max_tokens: int
    priority: int = 0
    arrived_at_s: float = 0.0
    order: int = 0
    output_tokens: int = 0
    to_prefill: int = 0
    preemptions: int = 0
    admitted_at_s: float | None = None
    first_token_at_s: float | None = None
    finished_at_s: float | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        """Who goes first: the smaller."""
        return (self.priority, self.arrived_at_s, self.order)

    @property
    def kv_tokens(self) -> int:
        """Tokens the sequence holds (or is about to fill) in the KV cache while it runs."""
        return self.input_tokens + self.output_tokens


@dataclass(slots=True)
class Totals:
    """Cumulative counts since the engine started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Batch:
    """The engine's state. Call `start_step`, wait as long as it says, then `end_step`; `add`, `abort` at any time."""

    timing: Timing
    step_tokens: int = STEP_TOKENS
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    _chunks: dict[Sequence, int] = field(default_factory=dict)
    _decoding: list[Sequence] = field(default_factory=list)
    _orders: count[int] = field(default_factory=count)

    @property
    def max_tokens(self) -> int:
        """The longest sequence (input and output) that can be served at all."""
        return min(self.timing.max_model_len, self.timing.kv_capacity_tokens)

    @property
    def kv_tokens(self) -> int:
        """Tokens resident in the KV cache."""
        return sum(sequence.kv_tokens for sequence in self.running)

    @property
    def decoding(self) -> int:
        """Sequences that the step begun last gives one more token."""
        return len(self._decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Raises ValueError when it can never fit."""
        if sequence.input_tokens + 1 > self.max_tokens:
            raise ValueError(
                f"the prompt has {sequence.input_tokens} tokens and this engine holds {self.max_tokens}, "
                "answer included: shorten the prompt"
            )
        sequence.max_tokens = max(1, min(sequence.max_tokens, self.max_tokens - sequence.input_tokens))
        sequence.order = next(self._orders)
        insort(self.waiting, sequence, key=lambda one: one.rank)

    def abort(self, sequence: Sequence) -> None:
        """Forget a request; no-op when it has left already."""
        for queue in (self.running, self.waiting, self._decoding):
            if sequence in queue:
                queue.remove(sequence)
        self._chunks.pop(sequence, None)

    def start_step(self, now_s: float) -> float | None:
        """Decide who takes part in the next step; its duration in seconds, or None when there is nothing to do."""
        if not self._make_room():
            self._admit(now_s)
        self._decoding = [one for one in self.running if one.to_prefill == 0]
        self._chunks, fixed = self._share_prefill(self.step_tokens - len(self._decoding))
        if not self._decoding and not self._chunks:
            return None
        duration_s = fixed * self.timing.prefill_fixed_s + sum(self._chunks.values()) / self.timing.prefill_tps
        if self._decoding:
            held = sum(one.kv_tokens for one in self._decoding)
            duration_s += decode_step_s(self.timing, len(self._decoding), held)
        return duration_s

    def end_step(self, now_s: float) -> list[Sequence]:
        """Account the step begun last as done at `now_s`; the sequences that got a token in it (some now finished)."""
        served = list(self._decoding)
        for sequence, tokens in self._chunks.items():
            sequence.to_prefill -= tokens
            self.totals.prompt_tokens += tokens
            if sequence.to_prefill == 0:
                served.append(sequence)
        for sequence in served:
            self._give_token(sequence, now_s)
        self._chunks, self._decoding = {}, []
        return served

    def _give_token(self, sequence: Sequence, now_s: float) -> None:
        sequence.output_tokens += 1
        self.totals.generation_tokens += 1
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
        if sequence.output_tokens >= sequence.max_tokens:
            sequence.finished_at_s = now_s
            self.running.remove(sequence)

    def _make_room(self) -> bool:
        """Preempt until every running sequence can grow by one token; whether any was."""
        preempted = False
        while self.kv_tokens + len(self.running) > self.timing.kv_capacity_tokens and len(self.running) > 1:
            victim = max(self.running, key=lambda one: one.rank)
            self.running.remove(victim)
            victim.preemptions += 1
            self.totals.preemptions += 1
            insort(self.waiting, victim, key=lambda one: one.rank)
            preempted = True
        return preempted

    def _admit(self, now_s: float) -> None:
        held = self.kv_tokens + len(self.running)
        while self.waiting and len(self.running) < self.timing.max_num_seqs:
            head = self.waiting[0]
            if held + head.kv_tokens + 1 > self.timing.kv_capacity_tokens:
                return
            held += head.kv_tokens + 1
            head.to_prefill = head.kv_tokens
            if head.admitted_at_s is None:
                head.admitted_at_s = now_s
            self.running.append(self.waiting.pop(0))

    def _share_prefill(self, budget: int) -> tuple[dict[Sequence, int], int]:
        """Prompt tokens per sequence of this step, first in rank first, and how many of these prompts begin in it."""
        chunks: dict[Sequence, int] = {}
        begun = 0
        for one in sorted((one for one in self.running if one.to_prefill), key=lambda one: one.rank):
            tokens = min(one.to_prefill, budget)
            if tokens <= 0:
                break
            chunks[one] = tokens
            begun += one.to_prefill == one.kv_tokens
            budget -= tokens
        return chunks, begun
