"""What the trainer pushes is what an engine computes with; one that cannot load does not end the run."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from polar.app.weights import EngineWeights, SharedWeights
from polar.engines import nccl, transfer
from polar.engines.transfer import MANIFEST, Share, SharedTensors
from polar.errors import Conflict, InvalidInput, NotInstalled, PolarError, Unavailable
from polar.models.policy import PolicyView
from polar.training import run
from polar.training.checkpoint import write_weights
from polar.training.policy import load_policy
from polar.training.settings import GrpoSettings, Lora, ModelSettings
from tests.fakes.pushed_weights import LoadingServer, OnGpu, SharingServer

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "adapter"])
def test_an_engine_computes_with_what_was_pushed(
    tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    settings = ModelSettings.model_validate({"name": str(tiny_model), "device": "cpu", "lora": lora})
    policy, server = load_policy(settings), LoadingServer(tiny_model)
    sink = EngineWeights(cast(Any, server), tmp_path / "run", tmp_path / "weights")
    before = server.engine(IDS).logits.detach()
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.02 * torch.randn_like(parameter))
    assert sink.push(policy) == 1
    ours = policy.model(IDS).logits.detach()
    assert float((ours - before).abs().max()) > 1e-2
    assert float((ours - server.engine(IDS).logits.detach()).abs().max()) < 1e-4


def test_large_weights_are_several_files(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3, 5, dtype=torch.bfloat16) for name in "abc"} | {"d": torch.tensor(7)}
    write_weights(tensors, tmp_path, file_bytes=70)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == 98
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_all_weights_are_pushed_as_they_are_computed_with(tiny_model: Path, tmp_path: Path) -> None:
    settings = ModelSettings(name=str(tiny_model), device="cpu", precision="bfloat16")
    policy = load_policy(settings)
    (tmp_path / "pushed").mkdir()
    policy.export(tmp_path / "pushed")
    policy.save(tmp_path / "kept")
    pushed, kept = (load_file(tmp_path / name / "model.safetensors") for name in ("pushed", "kept"))
    assert pushed.keys() == kept.keys()
    assert {tensor.dtype for tensor in pushed.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert all(torch.equal(pushed[name], kept[name].bfloat16()) for name in kept)


def test_a_checkpoint_keeps_every_chat_template_of_its_model(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    of_tools = Path("additional_chat_templates", "tool_use.jinja")
    (tmp_path / "model" / of_tools).parent.mkdir()
    (tmp_path / "model" / of_tools).write_text("{{ tools }}")
    load_policy(ModelSettings(name=str(tmp_path / "model"), device="cpu")).save(tmp_path / "kept")
    assert (tmp_path / "kept" / of_tools).read_text() == "{{ tools }}"


def test_only_the_newest_weights_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    policy, server = load_policy(ModelSettings(name=str(tiny_model), device="cpu")), LoadingServer(tiny_model)
    for _ in range(2):
        sink = EngineWeights(cast(Any, server), tmp_path / "run", tmp_path / "weights")
        sink.push(policy)
    assert len(list((tmp_path / "weights").glob("*/*"))) == 1


@pytest.mark.parametrize(
    "refusal", [Unavailable("no node could load it"), Conflict("the policy is paused by 'somebody'")]
)
def test_engines_that_cannot_load_stay_where_they_are(
    tiny_model: Path, tmp_path: Path, refusal: PolarError
) -> None:
    policy, server = load_policy(ModelSettings(name=str(tiny_model), device="cpu")), LoadingServer(tiny_model)
    sink = EngineWeights(cast(Any, server), tmp_path / "run", tmp_path / "weights")
    server.refusal = refusal
    with pytest.raises(type(refusal)):
        sink.push(policy)
    server.refusal = None
    assert sink.push(policy) == 1
    server.refusal = refusal
    assert sink.push(policy) == 1
    server.refusal = None
    assert sink.push(policy) == 2


def _sharing(tmp_path: Path) -> tuple[SharingServer, EngineWeights]:
    server = SharingServer()
    return server, EngineWeights(
        cast(Any, server), tmp_path / "run", tmp_path / "weights", share=SharedTensors
    )


def _manifests(directory: Path) -> list[Path]:
    return [manifest.parent for manifest in directory.rglob(MANIFEST)]


def test_engines_that_start_later_read_files_of_weights_that_were_shared(tmp_path: Path) -> None:
    (server, sink), policy = _sharing(tmp_path), OnGpu()
    assert [sink.push(policy), sink.push(policy)] == [1, 2]
    assert MANIFEST in server.found
    assert "model.safetensors" not in server.found
    sink.wait_for_files()
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
    assert _manifests(tmp_path) == policy.held == []


def test_engines_that_cannot_be_sent_weights_need_not_wait_for_the_others_to_read_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Waiting(SharingServer):
        """As one whose only engine waits for files."""

        def update_policy(self, path: Path, *, version: int) -> PolicyView:
            has_files.wait(30)
            view = super().update_policy(path, version=version)
            if is_refused:
                self.view = PolicyView(version=0, newest=version, path=None)
                raise Unavailable("no node could load it")
            return view

    class Writing(OnGpu):
        def share(self, directory: Path, share: Share) -> SharedWeights:
            shared = super().share(directory, share)

            def write() -> None:
                shared.write()
                has_files.set()
                # Its directory is not taken away while it is being written to.
                directory.joinpath("tokenizer.json").touch()

            return replace(shared, write=write)

    has_files, is_refused = Event(), False
    server, policy = Waiting(), Writing(files_at_once=True)
    sink = EngineWeights(cast(Any, server), tmp_path / "run", tmp_path / "weights", share=SharedTensors)
    assert sink.push(policy) == 1
    assert "model.safetensors" in server.found
    is_refused = True
    has_files.clear()
    assert sink.push(policy) == 1
    sink.wait_for_files()
    assert policy.held == []
    assert "on the GPU alone" not in caplog.text


def test_a_run_without_vllm_cannot_send_weights_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GrpoSettings.model_validate(
        {"out": tmp_path, "steps": 1, "rollouts": {"tasks": ["unused"], "transfer": "nccl"}}
    )
    monkeypatch.setattr(run, "load_tasks", lambda *_: [])
    monkeypatch.setattr(nccl, "find_spec", lambda _: None)
    with pytest.raises(NotInstalled, match="needs vLLM"), ExitStack() as stack:
        run.assemble(settings, stack, print)


def test_a_run_that_goes_on_starts_no_engine_beside_memory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start(*_: object) -> Any:
        raise Started

    settings = GrpoSettings.model_validate(
        {"out": tmp_path, "steps": 1, "rollouts": {"tasks": ["unused"], "transfer": "cuda-ipc"}}
    )
    weights = tmp_path / ".polar" / "weights"
    sink = EngineWeights(cast(Any, SharingServer()), tmp_path, weights, share=SharedTensors)
    sink.push(OnGpu(OSError("killed before the files were written")))
    sink.wait_for_files()
    (left,) = _manifests(weights)
    (left / "model-00001-of-00002.safetensors").touch()
    monkeypatch.setattr(run, "load_tasks", lambda *_: [])
    monkeypatch.setattr(run, "server_beside_trainer", start)
    with pytest.raises(Started), ExitStack() as stack:
        run.assemble(settings, stack, print)
    # Nor are half of the files taken for all of them.
    assert not _manifests(weights)
    assert not list(weights.rglob("*.safetensors"))


@pytest.mark.parametrize("trouble", [OSError(ENOSPC, "No space left on device"), RuntimeError("CUDA error")])
def test_shared_weights_are_held_as_long_as_engines_may_read_them(tmp_path: Path, trouble: Exception) -> None:
    (_, sink), policy = _sharing(tmp_path), OnGpu(trouble)
    for _ in range(2):
        sink.push(policy)
        sink.wait_for_files()
        assert len(policy.held) == 1
        assert _manifests(tmp_path) == policy.held
        # Half of the files would be taken for all of them once the memory is let go.
        assert not list(tmp_path.rglob("*.safetensors"))
    # Nothing can be read of a process that has ended.
    sink.close()
    assert _manifests(tmp_path) == policy.held == []


@pytest.mark.parametrize("is_decided", [True, False])
@pytest.mark.parametrize(
    "trouble",
    [Unavailable("no node could load it"), InvalidInput("no such directory"), KeyboardInterrupt()],
    ids=["refused", "another error", "interrupted"],
)
def test_the_memory_of_a_push_that_failed_is_let_go(
    tmp_path: Path, trouble: BaseException, is_decided: bool
) -> None:
    (server, sink), policy = _sharing(tmp_path), OnGpu()
    server.trouble, server.is_decided = trouble, is_decided
    with pytest.raises(type(trouble)):
        sink.push(policy)
    sink.wait_for_files()
    assert _manifests(tmp_path) == policy.held == []
    # Whoever may still be told of them finds files.
    is_kept = not (is_decided and isinstance(trouble, Unavailable))
    assert len(list(tmp_path.rglob("model.safetensors"))) == is_kept


def test_the_memory_of_older_weights_is_let_go_when_its_last_reader_has_ended(tmp_path: Path) -> None:
    (_, sink), policy = _sharing(tmp_path), OnGpu(OSError(ENOSPC, "No space left on device"))
    sink.push(policy)
    sink.wait_for_files()
    (older,) = policy.held
    with ThreadPoolExecutor() as pool:
        with transfer.reading(older):
            pushing = pool.submit(sink.push, policy)
            with pytest.raises(TimeoutError):
                pushing.result(0.3)
            assert older in policy.held
        assert pushing.result(30) == 2
    assert older not in policy.held
    sink.close()


def test_weights_that_do_not_fit_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    class Large:
        def export(self, directory: Path) -> None:
            (directory / "half").write_bytes(b"half of them")
            raise OSError(ENOSPC, "No space left on device")

    sink = EngineWeights(cast(Any, LoadingServer(tiny_model)), tmp_path / "run", tmp_path / "weights")
    with pytest.raises(OSError, match="No space"):
        sink.push(Large())
    assert not list((tmp_path / "weights").glob("*/*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_that_starts_with_an_adapter_samples_with_it_and_trains_it_on(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    lora = {"rank": 4, "alpha": 8}
    fresh = ModelSettings.model_validate({"name": str(tiny_model), "device": "cpu", "lora": lora})
    warm = load_policy(fresh)
    with torch.no_grad():
        for parameter in warm.parameters:
            parameter.copy_((parameter + 0.05 * torch.randn_like(parameter)).to(dtype))
    expected = warm.model(IDS).logits.detach()
    warm.model.save_pretrained(tmp_path / "warm")
    # An adapter that ships with a package is kept in half the bytes.
    file = tmp_path / "warm" / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)

    # The rank of the adapter that it starts with counts, not that of the settings.
    begun = load_policy(fresh.model_copy(update={"start": tmp_path / "warm", "lora": Lora(rank=16)}))
    server = LoadingServer(tiny_model)
    before = server.engine(IDS).logits.detach()
    EngineWeights(cast(Any, server), tmp_path / "run", tmp_path / "weights").push(begun)
    assert float((begun.model(IDS).logits - expected).detach().abs().max()) < 1e-4
    assert float((server.engine(IDS).logits - expected).detach().abs().max()) < 1e-4
    assert float((server.engine(IDS).logits - before).detach().abs().max()) > 1e-2
    assert {parameter.dtype for parameter in begun.parameters} == {torch.float32}
    assert all(parameter.requires_grad for parameter in begun.parameters)
