"""Chooses a model's renderer by what the model is, never by its name or path.

It is the model's own chat template, if that can be rendered turn by turn. Otherwise families of a package
render probe conversations, and one with the template's ids is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from polar.errors import InvalidInput, NotInstalled
from polar.rendering.base import Renderer
from polar.rendering.template import ChatTemplate, read_template
from polar.rendering.template_proof import proved_renderer
from polar.rendering.template_renderer import TEMPLATE, TemplateRenderer
from polar.rendering.tokenizer import read_tokenizer

log = logging.getLogger(__name__)

_BY_TEMPLATE = {
    **dict.fromkeys(("chatml", "smollm2", "qwen2.5", "qwen2.5-coder"), "<|im_start|>"),
    **{"qwen3-coder": "<function=", "mistral": "[INST]", "llama-3.1": "<|start_header_id|>"},
    **{"gemma": "<start_of_turn>", "gemma3": "<start_of_turn>", "phi": "<|assistant|>"},
    **{"kimi": "<|im_middle|>", "glm": "[gMASK]", "gpt-oss": "<|channel|>"},
}
"""Families that need only their template, by the marks it writes."""
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ESSENTIAL = frozenset({"a question", "a system message", "a second question", "tools"})
"""Probes that a family must render as the template does; differences in others are logged."""
_SAVE_ONE = "save one as chat_template.jinja beside its tokenizer.json"


def renderer_for(
    model: str,
    directory: Path,
    *,
    family: str | None = None,
    tool_form: str | None = None,
    tool_prompt: bool = False,
    keeps_thoughts: bool = False,
) -> Renderer:
    """The renderer of the model in `directory`; InvalidInput says why there is none.

    `family` names one instead of the template's choice; `tool_form` says how calls are written where the
    template itself renders. `tool_prompt` describes tools to a model whose template shows none, and
    demonstrates calls. With `keeps_thoughts` a conversation is also extended where the model's template drops
    earlier thoughts.
    """
    if not (directory / "tokenizer.json").is_file():
        raise InvalidInput(
            f"model {model}: {directory} has no tokenizer.json",
            hint="save the fast tokenizer beside the weights",
        )
    candidates = _Candidates(
        directory, tool_form=tool_form, tool_prompt=tool_prompt, keeps_thoughts=keeps_thoughts
    )
    if family is not None or tool_form is not None:
        return candidates.by_name(family or TEMPLATE)
    return candidates.prove(model)


class _Candidates:
    """The families that may fit a model."""

    def __init__(
        self, directory: Path, *, tool_form: str | None, tool_prompt: bool, keeps_thoughts: bool
    ) -> None:
        # One for all candidates, since reading it takes long; each sets whether control tokens count in text.
        self._directory = directory
        self._tokenizer = read_tokenizer(directory / "tokenizer.json")
        self._template = read_template(directory, self._tokenizer)
        self._tool_form = tool_form
        self._tool_prompt = tool_prompt
        self._keeps_thoughts = keeps_thoughts

    def by_name(self, family: str) -> Renderer:
        from polar.rendering.adapter import INSTALL, PACKAGE_FAMILIES, adapted_renderer, is_installed

        if family == TEMPLATE:
            return _warn_about(self._general())
        source = self._template.source if self._template else ""
        if family in _BY_TEMPLATE and (family not in PACKAGE_FAMILIES or _BY_TEMPLATE[family] in source):
            return self._by_template(family)
        if family not in PACKAGE_FAMILIES:
            known = ", ".join((TEMPLATE, *_BY_TEMPLATE))
            more = "of the package renderers" if is_installed() else f"after {INSTALL}"
            raise InvalidInput(
                f"engine.renderer: unknown family {family}",
                hint=f"known: {known}; {more}: {', '.join(PACKAGE_FAMILIES)}",
            )
        renderer = adapted_renderer(family, self._tokenizer, keeps_thoughts=self._keeps_thoughts)
        if differences := self._template.differences(renderer) if self._template else []:
            log.warning("renderer %s: the model's template differs in %s", family, ", ".join(differences))
        return renderer

    def _by_template(self, family: str) -> Renderer:
        """The model's template, if it is of this family; plain ChatML also without one."""
        mark = _BY_TEMPLATE[family]
        if self._template is None and family == "chatml":
            log.warning("the model has no chat template: plain ChatML renders it, as engine.renderer says")
            self._template = ChatTemplate(_CHATML, self._directory, self._tokenizer)
        if self._template is None:
            raise InvalidInput(
                f"engine.renderer: {family} is rendered by the model's own chat template, and it has none",
                hint=f"{_SAVE_ONE}, as the publisher of its base model has it; chatml needs none",
            )
        if mark not in self._template.source:
            raise InvalidInput(
                f"engine.renderer: the model's chat template is not one of {family}: it never writes {mark}",
                hint="leave engine.renderer out: the family is found by the template",
            )
        return _warn_about(self._general())

    def prove(self, model: str) -> Renderer:
        """Use the template itself, else a family of the package with the same ids."""
        if self._template is None:
            raise InvalidInput(
                f"model {model}: it has no chat template",
                hint=f"{_SAVE_ONE}, or name its family with engine.renderer",
            )
        general, why = self._general_or_why()
        if general is not None and general.call_form is not None:
            return _warn_about(general)
        found: dict[str, list[str]] = {}
        for family, renderer in self._of_package():
            found[family] = self._template.differences(renderer)
            if not found[family]:
                return self.by_name(family)
        nearest = min(found, key=lambda family: len(found[family]), default=None)
        if nearest is not None and not _ESSENTIAL.intersection(found[nearest]):
            return self.by_name(nearest)
        if general is not None:
            # Made again: the others have used the same tokenizer.
            return _warn_about(self._general())
        raise InvalidInput(
            f"model {model}: no renderer gives the ids of its chat template, and {why}",
            hint=_nearest_hint(nearest, found[nearest]) if nearest else _no_family_hint(),
        )

    def _general_or_why(self) -> tuple[TemplateRenderer | None, str]:
        try:
            return self._general(), ""
        except InvalidInput as error:
            return None, error.message

    def _general(self) -> TemplateRenderer:
        if self._template is None:
            raise InvalidInput(
                f"engine.renderer: {TEMPLATE} needs a chat template beside the tokenizer", hint=_SAVE_ONE
            )
        return proved_renderer(
            self._template,
            self._tokenizer,
            call_form=self._tool_form,
            tool_prompt=self._tool_prompt,
            keeps_thoughts=self._keeps_thoughts,
        )

    def _of_package(self) -> Iterator[tuple[str, Renderer]]:
        from polar.rendering.adapter import adapted_renderer, is_installed, possible_families

        if not is_installed():
            return
        tokens = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        strange: list[str] = []
        for family in possible_families(tokens):
            try:
                yield family, adapted_renderer(family, self._tokenizer, keeps_thoughts=False)
            except InvalidInput as error:
                strange.append(family)
                log.debug("%s", error)
            except NotInstalled as error:
                log.warning("%s", error)
        if strange:
            log.info("the model's tokenizer is not of the families %s", ", ".join(strange))


def _warn_about(renderer: TemplateRenderer) -> TemplateRenderer:
    """Log what the renderer's template lacks."""
    if renderer.call_form is None:
        log.warning("the model's chat template shows no calls: it is offered no tools")
    elif renderer.tools_in_text is not None and not renderer.tools_in_text.describes:
        log.warning("the model's chat template shows no tools: it is told of none without engine.tool_prompt")
    if not renderer.extends:
        log.warning(
            "the model's chat template shows no turn as it was sampled, so each begins a new trace;"
            " engine.history keep goes on with what was sampled"
        )
    return renderer


def _no_family_hint() -> str:
    from polar.rendering.adapter import INSTALL, is_installed

    if not is_installed():
        return f"{INSTALL} adds families (DeepSeek V3, GLM, Kimi …)"
    return "no family of the package renderers has its control tokens; engine.mode chat is left"


def _nearest_hint(family: str, differences: list[str]) -> str:
    return f"nearest is {family}, which differs in {', '.join(differences)}; engine.renderer names it anyway"
