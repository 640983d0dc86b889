"""Prompts encoded once and looked up by integer id, so that no text travels with the data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cast_rl.backbones.base import Backbone, Cond
from cast_rl.fingerprint import encoding_fingerprint


class _Table:
    """Conditionings that a deep copy shares, and that moving or casting a module leaves alone."""

    def __init__(self, rows: Cond, negative: Cond | None):
        self.rows, self.negative = rows, negative

    def __deepcopy__(self, memo: dict) -> _Table:
        return self


class _FileTable(_Table):
    """One that is memory-mapped from a file: rows are read when they are asked for, and a pickle holds the path."""

    def __init__(self, path: Path):
        tables: dict[str, Cond] = {"rows": {}, "negative": {}}
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():
                table, name = key.split(".", 1)
                tables[table][name] = file.get_tensor(key)
        super().__init__(tables["rows"], tables["negative"] or None)
        self.path = path

    def __reduce__(self) -> tuple:
        return _FileTable, (self.path,)


class PromptBank(nn.Module):
    """Conditionings of a fixed list of prompts; the id of a prompt is its place in the list.

    The table is no part of `parameters`, `buffers` or `state_dict`. All rows are padded to the longest, so a
    prompt is seen at the same length in every batch.

    Args:
        rows: tensors (N, ...) as `Backbone.encode` gives them.
        negative: the same with one row, used for every prompt, or None.
        texts: the N prompts.
    """

    def __init__(self, rows: Cond, negative: Cond | None, texts: Sequence[str]):
        super().__init__()
        for key, value in rows.items():
            if len(value) != len(texts):
                raise ValueError(f"PromptBank: {key!r} has {len(value)} rows for {len(texts)} prompts.")
        for key, value in (negative or {}).items():
            if len(value) != 1:
                raise ValueError(f"PromptBank: the negative {key!r} must have one row, got {len(value)}.")
        self._table = _Table(rows, negative)
        self.texts = tuple(texts)

    @classmethod
    def encode(
        cls,
        backbone: Backbone,
        texts: Sequence[str],
        negative: str | None = " ",
        *,
        batch_size: int = 64,
        storage_device: torch.device | str = "cpu",
        folder: str | Path | None = None,
    ) -> PromptBank:
        """Encode `texts` with the backbone's text encoders, `batch_size` at a time.

        Args:
            negative: negative prompt; encoded only if the backbone's guidance uses one.
            storage_device: where the table is kept. Rows move to the device of the ids that ask for them.
            folder: keep the table in a file there instead, memory-mapped. Its name is a hash of all that the
                encodings depend on (see `cast_rl.fingerprint`); one that is there already is used as it is.

        Raises:
            ValueError: no prompts, or the backbone's guidance needs a negative prompt and it is None, or `folder`
                holds something else under the file's name.
        """
        texts = list(texts)
        if not texts:
            raise ValueError("PromptBank.encode got no prompts.")
        if backbone.uses_negative and negative is None:
            raise ValueError(
                f"PromptBank.encode: guidance={backbone.guidance} needs a negative prompt, got None; "
                "pass negative=' ' or load the backbone with guidance=None."
            )
        if folder is not None:
            used = negative if backbone.uses_negative else None
            fingerprint = encoding_fingerprint(backbone, texts, used)
            path = Path(folder) / f"prompts-{fingerprint[:20]}.safetensors"
            if path.exists():
                return cls.open(path, fingerprint=fingerprint)
            cls.encode(backbone, texts, negative, batch_size=batch_size).save(path, fingerprint=fingerprint)
            return cls.open(path, fingerprint=fingerprint)
        parts = [backbone.encode(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        rows = {key: value.to(storage_device) for key, value in concatenate(parts).items()}
        negative_row = None
        if backbone.uses_negative:
            negative_row = {k: v.to(storage_device) for k, v in backbone.encode([negative]).items()}
        return cls(rows, negative_row, texts)

    def save(self, path: str | Path, *, fingerprint: str = "") -> None:
        """Write table and texts to a safetensors file, all of it or nothing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = {"rows": self._table.rows, "negative": self._table.negative or {}}
        tensors = {f"{table}.{k}": v.contiguous() for table, rows in tables.items() for k, v in rows.items()}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"texts": json.dumps(self.texts), "fingerprint": fingerprint})
        os.replace(partial, path)

    @classmethod
    def open(cls, path: str | Path, *, fingerprint: str | None = None) -> PromptBank:
        """The bank that `save` wrote, memory-mapped: rows are read from disk when they are asked for.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no prompt bank, or one with another fingerprint than is asked for.
        """
        path = Path(path).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"PromptBank.open: there is no file {path}; encode the prompts and save them.")
        try:
            with safe_open(path, framework="pt") as file:
                record = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"PromptBank.open: {path} is no safetensors file ({error}); delete it.") from error
        if "texts" not in record:
            raise ValueError(f"PromptBank.open: {path} is no prompt bank; it names no texts.")
        if fingerprint is not None and record["fingerprint"] != fingerprint:
            raise ValueError(
                f"PromptBank.open: {path} was encoded with other prompts, encoders or settings (fingerprint "
                f"{record['fingerprint'][:20]!r}, not {fingerprint[:20]!r}); delete it, or give another path."
            )
        table = _FileTable(path)
        bank = cls(table.rows, table.negative, json.loads(record["texts"]))
        bank._table = table
        return bank

    def __len__(self) -> int:
        return len(self.texts)

    def forward(self, prompt_id: Tensor) -> tuple[Cond, Cond | None]:
        """Integer ids (B,) or (B, 1) to ``(cond, negative or None)``, B rows each, on the ids' device."""
        ids = self._checked(prompt_id)
        table, device = self._table, prompt_id.device
        cond = {key: value[ids.to(value.device)].to(device) for key, value in table.rows.items()}
        if table.negative is None:
            return cond, None
        negative = {k: v.to(device).expand(len(ids), *v.shape[1:]) for k, v in table.negative.items()}
        return cond, negative

    def _checked(self, prompt_id: Tensor) -> Tensor:
        if prompt_id.is_floating_point() or prompt_id.is_complex() or prompt_id.dtype == torch.bool:
            raise TypeError(f"PromptBank: prompt ids must be integers, got {prompt_id.dtype}.")
        if prompt_id.ndim not in (1, 2) or (prompt_id.ndim == 2 and prompt_id.shape[1] != 1):
            raise ValueError(f"PromptBank: prompt ids must be (B,) or (B, 1), got {tuple(prompt_id.shape)}.")
        ids = prompt_id.reshape(-1).long()
        outside = ids[(ids < 0) | (ids >= len(self))]
        if len(outside):
            raise IndexError(f"PromptBank: prompt id {int(outside[0])} is outside 0 to {len(self) - 1}.")
        return ids


def concatenate(parts: Sequence[Cond]) -> Cond:
    """Join conditionings along the batch, text padded on the right with zeros (False in masks)."""

    def pad(value: Tensor, length: int) -> Tensor:
        return F.pad(value, (0, 0) * (value.ndim - 2) + (0, length - value.shape[1]))

    joined = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if "mask" in parts[0] and values[0].shape[:2] == parts[0]["mask"].shape:
            length = max(value.shape[1] for value in values)
            values = [pad(value, length) for value in values]
        joined[key] = torch.cat(values)
    return joined
