"""Which renderer a model gets, by what the model is: never by its name or its path.

Families render probe conversations, and one whose ids are those of the model's own template is the model's.
The template itself is the renderer of most models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from polar.errors import InvalidInput
from polar.rendering.base import Renderer
from polar.rendering.chatml import END, START, ChatML, ToolForm
from polar.rendering.template import PROBES, ChatTemplate, read_template
from polar.rendering.template_proof import proved_renderer
from polar.rendering.template_renderer import TemplateRenderer
from polar.rendering.tokenizer import read_tokenizer
from polar.rendering.tool_prompt import HERMES_FRAME

log = logging.getLogger(__name__)

CHATML = "chatml"
QWEN25 = "qwen2.5"
_CHATML_HAS_NO = ("<tool_call>", "<think>", "<|vision_start|>", "<minimax:tool_call>")
"""Tokens of families that use ChatML's brackets but have tools of their own."""
_ESSENTIAL = frozenset({"a question", "a system message", "a second question", "tools"})
"""Probes that a family must render as the template does; differences in others are logged."""
TEMPLATE = "template"
_MORE_FAMILIES = "pip install 'polar-rl[renderers]' adds families (gpt-oss, Gemma 4, Qwen3 and later, GLM …)"


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
        return candidates.named(family or TEMPLATE)
    return candidates.proved(model)


class _Candidates:
    """The families that a model may belong to."""

    def __init__(
        self, directory: Path, *, tool_form: str | None, tool_prompt: bool, keeps_thoughts: bool
    ) -> None:
        self._directory = directory
        # One for all candidates, since reading it takes long; each sets whether control tokens count in text.
        self._tokenizer = read_tokenizer(directory / "tokenizer.json")
        self._tokens = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self._template = read_template(directory, self._tokenizer)
        self._tool_form = tool_form
        self._tool_prompt = tool_prompt
        self._keeps_thoughts = keeps_thoughts

    def named(self, family: str) -> Renderer:
        from polar.rendering.adapter import PACKAGE_FAMILIES, adapted_renderer

        if family == TEMPLATE:
            return _warned_about(self._general())
        renderer: Renderer | None = None
        if family in (CHATML, QWEN25):
            renderer = self._chatml(ToolForm.HERMES if family == QWEN25 else self._own_tools)
        elif family in PACKAGE_FAMILIES:
            renderer = adapted_renderer(family, self._tokenizer, keeps_thoughts=self._keeps_thoughts)
        if renderer is None:
            known = ", ".join((TEMPLATE, CHATML, QWEN25, *PACKAGE_FAMILIES))
            raise InvalidInput(f"engine.renderer: {family} is not available here", hint=f"known: {known}")
        if differences := self._differences(family, renderer):
            log.warning("renderer %s: the model's template differs in %s", family, ", ".join(differences))
        return renderer

    def proved(self, model: str) -> Renderer:
        """ChatML where its ids are the template's, else the template itself, else a family of the package."""
        if self._template is None:
            if {START, END} <= self._tokens and not self._tokens.intersection(_CHATML_HAS_NO):
                return self._chatml(self._own_tools)
            raise InvalidInput(
                f"model {model}: it has no chat template", hint="name its family with engine.renderer"
            )
        found: dict[str, list[str]] = {}
        for family, renderer in self._own():
            found[family] = self._differences(family, renderer)
            if not found[family]:
                return renderer
        general, why = self._general_or_why()
        if general is not None and general.call_form is not None:
            return _warned_about(general)
        for family, renderer in self._of_package():
            found[family] = self._differences(family, renderer)
            if not found[family]:
                return self.named(family)
        nearest = min(found, key=lambda family: len(found[family]), default=None)
        if nearest is not None and not _ESSENTIAL.intersection(found[nearest]):
            return self.named(nearest)
        if general is not None:
            # Made again: the others have used the same tokenizer.
            return _warned_about(self._general())
        raise InvalidInput(
            f"model {model}: no renderer gives the ids of its chat template, and {why}",
            hint=_MORE_FAMILIES if nearest is None else _nearest_hint(nearest, found[nearest]),
        )

    def _general_or_why(self) -> tuple[TemplateRenderer | None, str]:
        try:
            return self._general(), ""
        except InvalidInput as error:
            return None, error.message

    def _general(self) -> TemplateRenderer:
        if self._template is None:
            raise InvalidInput("engine.renderer: template needs a chat template beside the tokenizer")
        return proved_renderer(
            self._template,
            self._tokenizer,
            call_form=self._tool_form,
            tool_prompt=self._tool_prompt,
            keeps_thoughts=self._keeps_thoughts,
        )

    def _own(self) -> Iterator[tuple[str, Renderer]]:
        if not {START, END} <= self._tokens:
            return
        try:
            if self._template is None or not self._template.shows_tools:
                yield CHATML, self._chatml(self._own_tools)
            yield QWEN25, self._chatml(ToolForm.HERMES)
        except InvalidInput:
            return  # ChatML's brackets around a tokenizer of another kind

    def _of_package(self) -> Iterator[tuple[str, Renderer]]:
        from polar.rendering.adapter import adapted_renderer, possible_families

        for family in possible_families(self._tokens):
            renderer = adapted_renderer(family, self._tokenizer, keeps_thoughts=False)
            if renderer is not None:
                yield family, renderer

    @property
    def _own_tools(self) -> ToolForm:
        return ToolForm.PROMPT if self._tool_prompt else ToolForm.NONE

    def _chatml(self, tools: ToolForm) -> ChatML:
        if self._template is None:
            return ChatML(self._tokenizer, tools=tools)
        system = _default_system(self._template)
        frame = self._template.tool_frame or HERMES_FRAME
        return ChatML(self._tokenizer, default_system=system, tools=tools, tool_frame=frame)

    def _differences(self, family: str, renderer: Renderer) -> list[str]:
        if self._template is None:
            return []
        differences = self._template.differences(renderer)
        if family == CHATML and not self._template.shows_tools:
            # Its template knows no tools, so what is said of them is ours.
            return [what for what in differences if not PROBES[what][1]]
        return differences


def _warned_about(renderer: TemplateRenderer) -> TemplateRenderer:
    """The renderer, after the log says what its template lacks."""
    if renderer.call_form is None:
        log.warning("the model's chat template shows no calls: it is offered no tools")
    if not renderer.extends:
        log.warning(
            "the model's chat template shows no turn as it was sampled, so each begins a new trace;"
            " engine.history keep goes on with what was sampled"
        )
    return renderer


def _default_system(template: ChatTemplate) -> str | None:
    """What the template says in place of a system message."""
    text = template.text(*PROBES["a question"]) or ""
    found = re.match(rf"{re.escape(START)}system\n(.*?){re.escape(END)}\n", text, re.DOTALL)
    return found[1] if found else None


def _nearest_hint(family: str, differences: list[str]) -> str:
    return f"nearest is {family}, which differs in {', '.join(differences)}; engine.renderer names it anyway"
