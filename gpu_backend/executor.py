"""The real executor: runs a plan on a model and says how long that took."""

from __future__ import annotations

import time
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from gpu_backend.attention import Segment, copy_blocks, segment
from gpu_backend.load import Pools, make_pool
from gpu_backend.model import Batch, Decoder
from gpu_backend.sampling import Luck, best_beams, draw, seated
from gpu_backend.standing import StandingBatch
from gpu_backend.texts import AnswerKey, Texts
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove, Fork, StepPlan, StepResult, Work
from kvsim.engine.request import Sequence, Span


class ModelExecutor:
    """Runs one step a call. Block ids and moves are the scheduler's; the KV behind them stands
    here, with swap space on the host.

    Answers end at their forced lengths `output_tokens`, whatever they say. One answer is greedy;
    parallel ones are drawn, each by its own luck; beams are searched, so that here the model
    decides who is dropped. `registered` prefixes, so many tokens of a stream, are in the pool
    before the first request that shares them: they are computed when a block table first shows
    where, and that takes no time. Padding of static batches is computed in the linear layers, not
    attended. Where the cache is contiguous (`is_contiguous`: block tables are runs of ids), KV is
    read where it lies, and not gathered.

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
        seed: int = 0,
        registered: dict[int, int] | None = None,
        is_contiguous: bool = False,
    ) -> None:
        self.decoder = decoder
        self.kv, self.host_kv = make_pool(decoder, pools)
        self.texts = Texts(seed, decoder.shape.vocab_size)
        self._block_size = pools.block_size
        self._held = _run_of if is_contiguous else self._listed
        self._output_tokens = output_tokens
        self._luck = Luck(seed, output_tokens)
        self._standing = StandingBatch(pools.block_size)
        self._scores: dict[AnswerKey, float] = {}  # of beams: summed log-probabilities
        self._registered = {stream: [0, count] for stream, count in (registered or {}).items()}
        self._is_cuda = decoder.device.type == "cuda"
        self._now_ns = time.perf_counter_ns if self._is_cuda else time.thread_time_ns
        self._warm_up()

    @property
    def answers(self) -> dict[AnswerKey, list[int]]:
        """What was generated, by request index and sample."""
        return self.texts.answers

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        if self._registered:
            self._register(plan)
        start_ns = self._now_ns()
        self._move(plan.moves)
        self._standing.follow(plan, self.texts)
        making = [one for one in plan.work if _makes_token(one)]
        batch = self._batch(plan)
        finished, forks = [], []
        if len(batch.tokens):
            logits = self.decoder.logits(batch, self.kv)
            finished, forks = self._take(logits, making)
        if self._is_cuda:
            torch.cuda.synchronize(self.decoder.device)
        finished.sort(key=lambda seq: seq.order)
        return StepResult([max(self._now_ns() - start_ns, 1)], finished, forks)

    def _move(self, moves: list[BlockMove]) -> None:
        pools = {
            COPY: (self.kv, self.kv),
            SWAP_OUT: (self.kv, self.host_kv),
            SWAP_IN: (self.host_kv, self.kv),
        }
        for kind, run in groupby(moves, key=lambda move: move.kind):
            copy_blocks(*pools[kind], [(move.source, move.target) for move in run])

    def _batch(self, plan: StepPlan) -> Batch:
        """The standing rows, the step's work, padding; logits of whoever makes a token."""
        standing, device = self._standing, self.decoder.device
        row = len(standing.seqs)
        segments = [
            self._segment(place, context, 1, standing.tables[place])
            for place, context in enumerate(standing.contexts[:row].tolist())
        ]
        tokens, positions = [standing.tokens[:row]], [standing.contexts[:row] - 1]
        slots, rows = [standing.slots()], [np.arange(row)]
        for one in plan.work:
            seq, start, num_new = one
            one_tokens, one_positions, one_slots = self._rows_of(seq, start, num_new)
            tokens.append(one_tokens)
            positions.append(one_positions)
            slots.append(one_slots)
            blocks = np.array(seq.blocks, np.int64)
            segments.append(self._segment(row, start + num_new, num_new, blocks))
            row += num_new
            if _makes_token(one):
                rows.append(np.array([row - 1]))
        if padding := plan.num_padding_seqs + plan.num_padding_tokens:
            tokens.append(np.zeros(padding, np.int64))
            positions.append(np.zeros(padding, np.int64))
        flat = [
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (tokens, positions, slots, rows)
        ]
        return Batch(flat[0], flat[1], flat[2], segments, flat[3])

    def _rows_of(
        self, seq: Sequence, start: int, num_new: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and slots of a sequence's next tokens."""
        positions = np.arange(start, start + num_new)
        return self.texts.tokens(seq, start, num_new), positions, self._slots(seq.blocks, positions)

    def _slots(self, blocks: list[int], positions: np.ndarray) -> np.ndarray:
        size = self._block_size
        return np.array(blocks, np.int64)[positions // size] * size + positions % size

    def _segment(self, row: int, context: int, num_new: int, table: np.ndarray) -> Segment:
        held = self._held(table[: -(-context // self._block_size)])
        return segment(row, num_new, context, held, self.decoder.device)

    def _listed(self, blocks: np.ndarray) -> Tensor:
        return torch.from_numpy(blocks).to(self.decoder.device)

    def _take(self, logits: Tensor, making: list[Work]) -> tuple[list[Sequence], list[Fork]]:
        """Read the step's tokens from logits [R, V]: a row for each standing sequence, then for
        each work that makes a token. Who has finished, and which beams fork."""
        standing, finished, forks = self._standing, [], []
        seqs = [*standing.seqs, *(one.seq for one in making)]
        tokens = logits.argmax(dim=-1).tolist()
        drawn = [
            (row, (seq.request.index, sample))
            for row, seq in enumerate(seqs)
            if seq.request.num_samples > 1 and not seq.request.is_beam
            for sample in (range(seq.width) if seq.width > 1 else (seq.sample,))
        ]
        said: dict[AnswerKey, int] = {}
        if drawn:
            luck = [self._luck.of(key, len(self.answers.get(key, ()))) for _, key in drawn]
            chosen = logits[torch.tensor([row for row, _ in drawn], device=logits.device)]
            keys = (key for _, key in drawn)
            said = dict(zip(keys, draw(chosen, luck), strict=True))
        for row, seq in enumerate(seqs):
            index = seq.request.index
            if not seq.request.is_beam:
                for sample in range(seq.width) if seq.width > 1 else (seq.sample,):
                    key = (index, sample)
                    tokens[row] = said.get(key, tokens[row])
                    self.answers.setdefault(key, []).append(tokens[row])
                if len(self.answers[index, seq.sample]) == self._output_tokens[index]:
                    finished.append(seq)
        standing.advance(tokens[: len(standing.seqs)])
        beams = [(row, seq) for row, seq in enumerate(seqs) if seq.request.is_beam]
        for _, group in groupby(beams, key=lambda pair: pair[1].request.index):
            rows, members = zip(*group, strict=True)
            forks += self._search(logits[rows[0] : rows[-1] + 1], list(members), finished)
        return finished, forks

    def _search(
        self, logits: Tensor, beams: list[Sequence], finished: list[Sequence]
    ) -> list[Fork]:
        """A step of beam search, over the prompt's last row or a row of every beam."""
        request = beams[0].request
        index, width = request.index, request.num_samples
        if not beams[0].num_generated:
            for sample, (_, token, score) in enumerate(best_beams(logits, [0.0], width)):
                self.answers[index, sample] = [token]
                self._scores[index, sample] = score
            if self._output_tokens[index] == 1:
                finished += beams
            return []
        keys = [(index, seq.sample) for seq in beams]
        found = best_beams(logits, [self._scores[key] for key in keys], width)
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
            tokens = self.texts.span(Span(head.stream, done, shared - done))
            flat = [tokens, positions, self._slots(seq.blocks, positions), np.arange(0)]
            tensors = [torch.from_numpy(one).to(self.decoder.device) for one in flat]
            one = self._segment(0, shared, shared - done, np.array(seq.blocks, np.int64))
            self.decoder.logits(Batch(*tensors[:3], [one], tensors[3]), self.kv)
            self._registered[head.stream] = [shared, count]

    def _warm_up(self) -> None:
        """The first products of a process cost more than all later ones."""
        device = self.decoder.device
        for count in (1, self._block_size):
            rows = torch.arange(count, device=device)
            one = self._segment(0, count, count, np.zeros(1, np.int64))
            for _ in range(2):
                self.decoder.logits(Batch(rows * 0, rows, rows, [one], rows), self.kv)


def _run_of(blocks: np.ndarray) -> slice:
    return slice(int(blocks[0]), int(blocks[0]) + len(blocks))


def _makes_token(work: Work) -> bool:
    """Whether the work computes all that its sequence knows (who joins has its count risen)."""
    seq, start, num_new = work
    return seq.joined_at >= 0 or start + num_new == seq.num_tokens
