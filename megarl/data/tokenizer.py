"""Text to token ids for prompts and demonstrations, token ids to text for rewards and people.

Responses are never re-tokenised; training sees the ids the server sampled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import DataError


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer, without templates and without tokens added on its own account.

    ``eos_id`` is what ends a demonstration; a response ends at any of ``eos_ids``.
    """

    hf: Any  # transformers' tokenizer
    eos_id: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Raises DataError where the tokenizer has no token for a part of the text."""
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        unknown = self.hf.unk_token_id
        if unknown is not None and unknown in ids:
            raise DataError(f"the tokenizer has no token for a part of {text!r}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Every token as text, marks like </think> too: the exact response."""
        text: str = self.hf.decode(
            [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def finished(self, response: Sequence[int]) -> bool:
        return len(response) > 0 and int(response[-1]) in self.eos_ids

    def response_text(self, response: Sequence[int]) -> str:
        """The decoded response without its end token."""
        return self.decode(response[:-1] if self.finished(response) else response)


def load_tokenizer(hf_dir: Path, eos_ids: Sequence[int] = ()) -> Tokenizer:
    """Read the tokenizer of a local folder; code that lies in the folder is never run.

    ``eos_ids``: further end tokens of the model (``ModelSpec.eos_ids``). Raises DataError.
    """
    import transformers  # seconds; the rest of data/ does not need it

    folder = Path(hf_dir)
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; a tokenizer is read from a local model folder")
    try:
        hf = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as e:
        raise DataError(f"no tokenizer could be read from {folder}: {e}") from e
    if hf.eos_token_id is None:
        raise DataError(f"the tokenizer in {folder} names no eos_token")
    eos = int(hf.eos_token_id)
    return Tokenizer(hf, eos, tuple(dict.fromkeys([*map(int, eos_ids), eos])))
