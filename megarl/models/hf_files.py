"""What lies beside the weights of a Hugging Face folder, and goes with the model unchanged.

config.json, tokenizer files, generation config, chat templates, licence and model card, and a
model's own Python code: copied as bytes, never imported, and never with the right to be run.
Weights in whatever format, their indexes and other folders stay behind.
"""

import re
import shutil
from pathlib import Path

_SUFFIXES = (".json", ".jinja", ".txt", ".tiktoken", ".bpe", ".vocab", ".spm", ".py", ".md")
_TOKENIZER = re.compile(r".*\.model(\.v\d+(m\d+)?)?")  # Mistral numbers its versions
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY", "COPYING")  # whatever follows
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_TEMPLATES = "additional_chat_templates"


def files_beside(folder: Path) -> list[Path]:
    """Relative to ``folder``, sorted."""
    found = [p for p in folder.iterdir() if p.is_file() and _is_kept(p.name)]
    if (folder / _TEMPLATES).is_dir():
        found += [p for p in (folder / _TEMPLATES).glob("*.jinja") if p.is_file()]
    return sorted(p.relative_to(folder) for p in found)


def copy_beside(source: Path, target: Path) -> None:
    """Into ``target``, made where it is not there."""
    target.mkdir(parents=True, exist_ok=True)
    for path in files_beside(source):
        (target / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / path, target / path)


def _is_kept(name: str) -> bool:
    if name.startswith(".") or name.endswith(_WEIGHTS):
        return False
    if name.endswith(_SUFFIXES) or _TOKENIZER.fullmatch(name):
        return True
    return name.upper().startswith(_NAMES)
