"""The asking side of ``cpu_worker``: starts a rival's process and waits for its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.machine import ROOT

_PATIENCE_S = 10


class RivalProcess:
    """A rival in a fresh process; it does nothing between two questions.

    Args:
        kind: key of ``cpu_worker.RIVALS``.
        settings: arguments of the rival's class.

    Raises:
        ValueError: it could not be loaded; the message is its own.
    """

    def __init__(self, kind: str, **settings: Any) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu_worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.facts = self._exchange({"kind": kind, **settings})
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask for one thing and wait for the answer.

        Raises:
            ValueError: the rival's own error, or it ended without an answer.
        """
        return self._exchange({"do": do, **arguments})

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def close(self) -> None:
        """End the process: at the end of its input, or by force where it does not notice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, and the answer that is missing has told so
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        line = ""
        try:
            print(json.dumps(request), file=stdin, flush=True)
            line = stdout.readline()
        except BrokenPipeError:
            pass  # as an empty answer
        if not line:
            raise ValueError(
                f"the process of {self.kind} ended with status {self._process.wait()} at {request}: its own "
                "message, if any, is above (a crash of llama.cpp: see --help for the build)"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer
