"""A transformers causal language model that decodes many sequences at once from slots.

1. A slot holds one sequence's keys and values, position by position from 0. Nothing is left-padded.
2. The unit of work is a row: one token with its position and its slot. Its keys and values are
   written to (slot, position), then it attends to its slot up to its position. A prompt is
   therefore several rows of one step, as good as several steps; rows of different sequences mix
   freely.
3. Fixed shape: every step has `num_slots` rows and attends over `context_length` keys; rows
   without work compute token 0 in a spare slot. Experts are computed densely (every expert for
   every row, then masked by the router's weights), so no shape depends on the routing. All
   operations act on rows alone, so a row's bits depend on its own token, position and slot content
   only. `check_rows_agree` verifies that this holds for this machine's kernels, whatever the row's
   place in the batch.
4. Otherwise a step has as many rows as there is work, attends no further than needed, and a long
   prompt goes through in one piece (`forward_chunk`).
5. `fp8`: layers multiply what FP8 leaves of weights and activations (``embedded_fp8.py``). What
   form the weights are held and received in is the folder's own affair (``embedded_load.py``).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from megarl.errors import ConfigError, Problem
from megarl.models.fp8_export import SCALES
from megarl.models.hf_io import HfCheckpoint
from megarl.models.live_folder import load_weights, open_weights
from megarl.rollout.embedded_fp8 import Fp8Weights
from megarl.rollout.embedded_kernels import DENSE_EXPERTS, experts_of, has_dense_form
from megarl.rollout.embedded_load import eos_ids, load_model

Mask = torch.Tensor | dict[str, torch.Tensor]  # True: visible

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SlotCache(Cache):
    """Keys and values of `num_slots` sequences and of one spare slot that idle rows write to."""

    def __init__(self, num_slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.spare = num_slots
        self._length = length
        self._keys: dict[
            int, torch.Tensor
        ] = {}  # layer -> [num_slots + 1, heads, length, head size]
        self._values: dict[int, torch.Tensor] = {}
        self._slots = self._positions = torch.zeros(0, dtype=torch.long)
        self._kv_length = length
        self._in_place = False

    def aim(
        self, slots: torch.Tensor, positions: torch.Tensor, kv_length: int, *, in_place: bool
    ) -> None:
        """Where the next forward writes (entry by entry) and how far it reads.

        `in_place`: row i reads slot i, so nothing needs to be gathered. One slot with several
        positions is a chunk: that slot is read once for all of them.
        """
        self._slots, self._positions = slots, positions
        self._kv_length, self._in_place = kv_length, in_place

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`key`, `value` [rows, heads, 1, size], or [1, heads, n, size] of a chunk. Writes, then
        reads."""
        return (
            self._through(self._keys, layer_idx, key),
            self._through(self._values, layer_idx, value),
        )

    def _through(
        self, stores: dict[int, torch.Tensor], layer: int, new: torch.Tensor
    ) -> torch.Tensor:
        if layer not in stores:
            shape = (self.spare + 1, new.shape[1], self._length, new.shape[3])
            stores[layer] = torch.zeros(shape, dtype=new.dtype, device=new.device)
        store = stores[layer]
        chunk = new.shape[0] == 1 and new.shape[2] > 1
        store[self._slots, :, self._positions] = new[0].transpose(0, 1) if chunk else new[:, :, 0]
        if self._in_place:
            return store[: new.shape[0], :, : self._kv_length]
        slots = self._slots[:1] if chunk else self._slots
        return store[:, :, : self._kv_length].index_select(0, slots)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._kv_length, 0

    @torch.inference_mode()
    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies whole slots."""
        for store in (*self._keys.values(), *self._values.values()):
            copied = store[torch.from_numpy(sources).to(store.device)]
            store[torch.from_numpy(targets).to(store.device)] = copied

    def drop(self) -> None:
        """Gives its memory back; what is written next takes it again, zeroed."""
        self._keys.clear()
        self._values.clear()

    @torch.inference_mode()
    def clear(self, slots: list[int] | None = None) -> None:
        """Zeroes slots (None: all), so that what an earlier sequence left cannot reach a later
        one."""
        for store in (*self._keys.values(), *self._values.values()):
            if slots is None:
                store.zero_()
            else:
                store[torch.tensor(slots, device=store.device)] = 0


class SlotModel:
    """A loaded model with its slots: rows in, logits and routing out."""

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int,
        context_length: int,
        dtype: str,
        fixed_shape: bool,
        fp8: str = "none",
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError([Problem("dtype", dtype, " or ".join(DTYPES))])
        if fp8 not in ("none", *SCALES):
            raise ConfigError([Problem("fp8", fp8, " or ".join(("none", *SCALES)))])
        self.folder, self.num_slots, self.fixed_shape = folder, num_slots, fixed_shape
        self.fp8 = fp8
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.weights = load_model(folder, DTYPES[dtype], self.device)
        self.config = self.module.config.get_text_config()
        self.context_length = context_length
        self.vocab_size: int = self.config.vocab_size
        self.eos_ids = eos_ids(folder, self.module)
        self._kinds = set(getattr(self.config, "layer_types", None) or [])
        self._window: int = getattr(self.config, "sliding_window", None) or 0
        self._routing: list[torch.Tensor] = []
        self._experts = [experts for _, experts in experts_of(self.module)]
        self._check_supported()
        for experts in self._experts:
            experts.register_forward_pre_hook(self._record_routing, with_kwargs=True)
        if self._dense:
            self.module.set_experts_implementation(DENSE_EXPERTS)
        elif not all(map(_can_be_grouped, self._experts)):
            self.module.set_experts_implementation("eager")
        self._rounded = None if fp8 == "none" else Fp8Weights(self.module, self.weights, fp8)
        self.cache = SlotCache(num_slots, context_length)

    def weights_changed(self) -> None:
        """To be called when the module's weights are no longer what they were."""
        if self._rounded is not None:
            self._rounded.refresh()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that weights take memory for."""
        yield from self.module.state_dict(keep_vars=True).values()
        yield from self.weights.held.values()
        if self._rounded is not None:
            yield from self._rounded.tensors()

    @property
    def _dense(self) -> bool:
        """Whether experts are computed densely: in FP8 they have no other form here."""
        return bool(self._experts) and (self.fixed_shape or self.fp8 != "none")

    @property
    def has_routing(self) -> bool:
        return bool(self._experts)

    @torch.inference_mode()
    def forward_rows(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.int32] | None]:
        """`tokens`, `positions`, `slots` [n]; slot `num_slots` marks an idle row.

        Returns logits f32 [n, V] and the experts of every row [n, M, K] (None without experts).
        """
        n = len(tokens)
        in_place = bool(np.all((slots == np.arange(n)) | (slots == self.num_slots)))
        kv_length = self.context_length if self.fixed_shape else int(positions.max()) + 1
        place = torch.from_numpy(positions).to(self.device)
        self.cache.aim(torch.from_numpy(slots).to(self.device), place, kv_length, in_place=in_place)
        mask = self._mask(place, kv_length, lambda visible: visible[:, None, None])
        ids = torch.from_numpy(tokens).to(self.device)[:, None]
        logits = self._forward(ids, place[:, None], mask)
        return logits[:, 0].float(), self._take_routing()

    @torch.inference_mode()
    def forward_chunk(
        self, tokens: NDArray[np.int64], start: int, slot: int, *, all_logits: bool
    ) -> tuple[torch.Tensor, NDArray[np.int32] | None]:
        """Consecutive tokens of one sequence from position `start` on; logits of all or of the
        last."""
        end = start + len(tokens)
        place = torch.arange(start, end, device=self.device)
        slots = torch.full((len(tokens),), slot, device=self.device)
        self.cache.aim(slots, place, end, in_place=False)
        mask = self._mask(place, end, lambda visible: visible[None, None])
        ids = torch.from_numpy(tokens).to(self.device)[None]
        logits = self._forward(ids, place[None], mask, keep=0 if all_logits else 1)
        return logits[0].float(), self._take_routing()

    def check_rows_agree(self) -> None:
        """Computes one sequence in every row, in place and gathered, and demands equal bits
        everywhere."""
        tokens = np.array([1 % self.vocab_size, 2 % self.vocab_size])
        order = np.arange(self.num_slots)
        outputs = []
        for slots in (order, np.roll(order, 1)):
            for position, token in enumerate(tokens[: self.context_length]):
                full = np.full(self.num_slots, token), np.full(self.num_slots, position)
                logits, _ = self.forward_rows(*full, slots)
            outputs.append(logits)
        self.cache.clear()
        if not torch.equal(outputs[0], outputs[1]) or not (outputs[0] == outputs[0][:1]).all():
            raise ConfigError(
                [Problem("fixed_shape", "true", "false: kernels here give a row bits by its place")]
            )

    def open_folder(self, folder: Path) -> HfCheckpoint:
        """Of the same model in the same form; raises DataError for anything else."""
        return open_weights(folder, self.weights)

    def load_folder(self, source: HfCheckpoint) -> None:
        """What ``open_folder`` has found. The caller then says ``weights_changed``. Raises
        DataError where the files have changed since: then there are no whole weights.
        """
        load_weights(source, self.weights)
        self.folder = source.folder

    def _mask(
        self, place: torch.Tensor, kv_length: int, shaped: Callable[[torch.Tensor], torch.Tensor]
    ) -> Mask:
        """Which keys the tokens at positions ``place`` see: one mask, or one a kind of layer."""
        before = place[:, None] - torch.arange(kv_length, device=self.device)
        visible = shaped(before >= 0)
        if not self._window:
            return visible
        near = visible & shaped(before < self._window)
        if not self._kinds:  # every layer has the window
            return near
        return {"full_attention": visible, "sliding_attention": near}

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask, keep: int = 0
    ) -> torch.Tensor:
        self._routing.clear()
        out = self.module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return out.logits

    def _record_routing(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._routing.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

    def _take_routing(self) -> NDArray[np.int32] | None:
        if not self._experts:
            return None
        return torch.stack(self._routing, dim=1).to(torch.int32).cpu().numpy()

    def _check_supported(self) -> None:
        problems = []
        accepted = {"full_attention", "sliding_attention"}
        contradiction = self._kinds and ("sliding_attention" in self._kinds) != bool(self._window)
        if not self._kinds <= accepted or contradiction:
            found = f"attention {sorted(self._kinds)} with sliding_window={self._window or None}"
            accepts = "full attention, or layer_types that name the layers with sliding attention"
            problems.append(Problem("model", found, accepts))
        if self._dense and not all(has_dense_form(e) for e in self._experts):
            reason = "this model's experts have no dense form here"
            if self.fixed_shape:
                problems.append(Problem("fixed_shape", "true", f"false: {reason}"))
            if self.fp8 != "none":
                problems.append(Problem("fp8", self.fp8, f"none: {reason}"))
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is not None and self.context_length > longest:
            problems.append(Problem("context_length", str(self.context_length), f"up to {longest}"))
        if problems:
            raise ConfigError(problems)


def _can_be_grouped(experts: torch.nn.Module) -> bool:
    """torch's grouped product takes matrices whose rows and columns are whole 16 bytes."""
    matrices = [p for p in experts.parameters() if p.dim() == 3]
    return all(n * p.element_size() % 16 == 0 for p in matrices for n in p.shape[1:])
