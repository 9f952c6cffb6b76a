"""The real executor: runs a plan on a model and says how long that took."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_backend.load import Pools, make_pool
from gpu_backend.model import Decoder
from gpu_backend.sampling import Luck, best_beams, candidates, draw, seated
from gpu_backend.standing import StandingBatch
from gpu_backend.step import Chunk, Ran, Runner, Step
from gpu_backend.texts import AnswerKey, Texts
from gpu_backend.torch_runner import TorchRunner
from kvsim.engine.plan import Fork, StepPlan, StepResult, Work
from kvsim.engine.request import Sequence, Span


class Beams(NamedTuple):
    """The beams of a request, or its prompt alone, in rows of a step one behind the other."""

    first: int
    members: list[Sequence]
    scores: list[float]


class Asked(NamedTuple):
    """Tokens of a step that are not the likeliest of their row: drawn ones, of the answer with this
    key, and those of beam searches."""

    drawn: list[tuple[int, AnswerKey]]
    searched: list[Beams]


class ModelExecutor:
    """Runs one step a call. Block ids and moves are the scheduler's; the KV behind them stands
    here, with swap space on the host; `make_runner` gets both and runs the model over them.

    Answers end at their forced lengths `output_tokens`, whatever they say. One answer is greedy;
    parallel ones are drawn, each by its own luck; beams are searched, so that here the model
    decides who is dropped. `registered` prefixes, so many tokens of a stream, are in the pool
    before the first request that shares them: they are computed when a block table first shows
    where, and that takes no time. Padding of static batches is computed in the linear layers, not
    attended.

    A duration is the time of the calling thread on a CPU (with one thread of torch that is what the
    step cost, whoever else uses the machine) and of the wall on a GPU, from the plan to the tokens
    on the host.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        output_tokens: list[int],
        *,
        make_runner: Callable[[Decoder, Tensor, Tensor], Runner] = TorchRunner,
        seed: int = 0,
        registered: dict[int, int] | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv, self.host_kv = make_pool(decoder, pools)
        self.texts = Texts(seed, decoder.shape.vocab_size)
        self._block_size = pools.block_size
        self._output_tokens = output_tokens
        self._luck = Luck(seed, output_tokens)
        self._standing = StandingBatch(pools.block_size)
        self._scores: dict[AnswerKey, float] = {}  # of beams: summed log-probabilities
        self._registered = {stream: [0, count] for stream, count in (registered or {}).items()}
        is_cuda = decoder.device.type == "cuda"
        self._now_ns = time.perf_counter_ns if is_cuda else time.thread_time_ns
        self._runner = make_runner(decoder, self.kv, self.host_kv)
        self._warm_up()

    @property
    def answers(self) -> dict[AnswerKey, list[int]]:
        """What was generated, by request index and sample."""
        return self.texts.answers

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        if self._registered:
            self._register(plan)
        start_ns = self._now_ns()
        self._standing.follow(plan, self.texts)
        making = [one.seq for one in plan.work if _makes_token(one)]
        seqs = [*self._standing.seqs, *making]
        asked = self._asked(seqs)
        ran = self._runner.run(plan.moves, self._step(plan), self._sent_along(asked))
        told = self._runner.read(_chosen(ran, asked))
        finished, forks = self._take(told, seqs, asked)
        finished.sort(key=lambda seq: seq.order)
        return StepResult([max(self._now_ns() - start_ns, 1)], finished, forks)

    def _asked(self, seqs: list[Sequence]) -> Asked:
        """Of the sequences that make a token, in the order of their rows."""
        drawn = [
            (row, (seq.request.index, sample))
            for row, seq in enumerate(seqs)
            if seq.request.num_samples > 1 and not seq.request.is_beam
            for sample in _samples(seq)
        ]
        searched = []
        beams = [(row, seq) for row, seq in enumerate(seqs) if seq.request.is_beam]
        for index, group in groupby(beams, key=lambda pair: pair[1].request.index):
            rows, members = zip(*group, strict=True)
            scores = [0.0]
            if members[0].num_generated:
                scores = [self._scores[index, seq.sample] for seq in members]
            searched.append(Beams(rows[0], list(members), scores))
        return Asked(drawn, searched)

    def _sent_along(self, asked: Asked) -> list[np.ndarray]:
        """Rows and luck of drawn tokens, and the scores of all beams."""
        luck = [self._luck.of(key, len(self.answers.get(key, ()))) for _, key in asked.drawn]
        return [
            np.array([row for row, _ in asked.drawn], np.int64),
            np.array(luck, np.float64),
            np.array([score for beams in asked.searched for score in beams.scores], np.float64),
        ]

    def _step(self, plan: StepPlan) -> Step:
        """The standing rows, the step's work, padding; logits of whoever makes a token."""
        standing, row = self._standing, len(self._standing.seqs)
        contexts = standing.contexts[:row]
        tokens, positions = [standing.tokens[:row]], [contexts - 1]
        slots, rows, chunks = [standing.slots()], [np.arange(row)], []
        for one in plan.work:
            seq, start, num_new = one
            one_tokens, one_positions, one_slots = self._rows_of(seq, start, num_new)
            tokens.append(one_tokens)
            positions.append(one_positions)
            slots.append(one_slots)
            chunks.append(Chunk(num_new, start + num_new, seq.blocks))
            row += num_new
            if _makes_token(one):
                rows.append(np.array([row - 1]))
        return Step(
            *(np.concatenate(parts) for parts in (tokens, positions, slots)),
            contexts,
            standing.tables[: len(contexts)],
            chunks,
            np.concatenate(rows),
            plan.num_padding_seqs + plan.num_padding_tokens,
        )

    def _rows_of(
        self, seq: Sequence, start: int, num_new: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and slots of a sequence's next tokens."""
        positions = np.arange(start, start + num_new)
        return self.texts.tokens(seq, start, num_new), positions, self._slots(seq.blocks, positions)

    def _slots(self, blocks: list[int], positions: np.ndarray) -> np.ndarray:
        size = self._block_size
        return np.array(blocks, np.int64)[positions // size] * size + positions % size

    def _take(
        self, told: np.ndarray, seqs: list[Sequence], asked: Asked
    ) -> tuple[list[Sequence], list[Fork]]:
        """Read the step's tokens, as `_chosen` lays them out. Who has finished, and which beams
        fork."""
        finished, forks = [], []
        tokens, end = told[: len(seqs)].tolist(), len(seqs) + len(asked.drawn)
        drawn_tokens = told[len(seqs) : end].tolist()
        said = {key: token for (_, key), token in zip(asked.drawn, drawn_tokens, strict=True)}
        for row, seq in enumerate(seqs):
            index = seq.request.index
            if not seq.request.is_beam:
                for sample in _samples(seq):
                    key = (index, sample)
                    tokens[row] = said.get(key, tokens[row])
                    self.answers.setdefault(key, []).append(tokens[row])
                if len(self.answers[index, seq.sample]) == self._output_tokens[index]:
                    finished.append(seq)
        self._standing.advance(tokens[: len(self._standing.seqs)])
        for beams in asked.searched:
            start, end = end, end + 2 * beams.members[0].request.num_samples
            forks += self._search(told[start:end], beams.members, finished)
        return finished, forks

    def _search(
        self, told: np.ndarray, beams: list[Sequence], finished: list[Sequence]
    ) -> list[Fork]:
        """A step of beam search, over the prompt's last row or a row of every beam."""
        found = candidates(told, self.decoder.shape.vocab_size)
        request = beams[0].request
        index, width = request.index, request.num_samples
        if not beams[0].num_generated:
            for sample, (_, token, score) in enumerate(found):
                self.answers[index, sample] = [token]
                self._scores[index, sample] = score
            if self._output_tokens[index] == 1:
                finished += beams
            return []
        keys = [(index, seq.sample) for seq in beams]
        seats = seated(found, width)
        before = [self.answers[key] for key in keys]
        for key, seat in zip(keys, seats, strict=True):
            self.answers[key] = [*before[seat.parent], seat.token]
            self._scores[key] = seat.score
        if len(before[0]) + 1 == self._output_tokens[index]:
            finished += beams  # who was dropped for whom shows in the answers alone
            return []
        return [
            Fork(beams[seat.parent], beam)
            for place, (beam, seat) in enumerate(zip(beams, seats, strict=True))
            if seat.parent != place
        ]

    def _register(self, plan: StepPlan) -> None:
        """Compute what is not there yet of the registered prefixes that this step's work shares."""
        size = self._block_size
        for seq, start, _ in plan.work:
            head = seq.request.prompt[0]
            done, count = self._registered.get(head.stream, (0, 0))
            shared = min(count, head.length, start) // size * size
            if head.start != 0 or shared <= done:
                continue
            positions = np.arange(done, shared)
            step = Step(
                self.texts.span(Span(head.stream, done, shared - done)),
                positions,
                self._slots(seq.blocks, positions),
                self._standing.contexts[:0],
                self._standing.tables[:0],
                [Chunk(shared - done, shared, seq.blocks)],
                np.arange(0),
            )
            self._runner.read(self._runner.run([], step, []).likeliest)
            self._registered[head.stream] = [shared, count]

    def _warm_up(self) -> None:
        """The first draw and the first search of a process cost more than all later ones."""
        logits = self.decoder.no_logits().new_zeros(1, self.decoder.shape.vocab_size)
        half = logits.new_full((1,), 0.5, dtype=torch.float64)
        draw(logits, half)
        best_beams(logits, half, 1)


def _chosen(ran: Ran, asked: Asked) -> Tensor:
    """int64, on the device: the likeliest token of every row; the drawn ones; of each beam search
    what `best_beams` says."""
    rows, luck, scores = ran.sent
    parts, done = [ran.likeliest], 0
    if asked.drawn:
        parts.append(draw(ran.logits[rows], luck))
    for first, members, known in asked.searched:
        one = ran.logits[first : first + len(known)]
        width = members[0].request.num_samples
        parts.append(best_beams(one, scores[done : done + len(known)], width))
        done += len(known)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _samples(seq: Sequence) -> range | tuple[int]:
    """The answers that a token of this sequence is drawn for: at the end of a shared prompt all."""
    return range(seq.width) if seq.width > 1 else (seq.sample,)


def _makes_token(work: Work) -> bool:
    """Whether the work computes all that its sequence knows (who joins has its count risen)."""
    seq, start, num_new = work
    return seq.joined_at >= 0 or start + num_new == seq.num_tokens
