"""A thread that serves one edge (or all edges of shared memory) of a lane until the lane stops or the edge breaks."""

from __future__ import annotations

import traceback

from refitd.errors import DeviceError, RefitdError, TransportError
from refitd.mover.board import Board
from refitd.mover.round import Edge, Stopped
from refitd.mover.thread import MoverThread


class Worker:
    """Subclasses do the work in `_serve` and wake themselves in `_interrupt`."""

    def __init__(self, board: Board, edge: Edge) -> None:
        self.board, self.edge, self.idle = board, edge, board.idle()
        self._thread = MoverThread(self._main, f"{edge[0]} -> {edge[1]}")

    def start(self) -> None:
        self._thread.start()

    def rouse(self) -> None:
        """Have the worker look whether there is a round for it."""
        with self.idle:
            self.idle.notify_all()

    def interrupt(self) -> None:
        """Wake the worker; it ends because the board is stopping."""
        self._interrupt()

    def join(self) -> None:
        """Return when the worker has ended. A worker that was never started has."""
        if self._thread.ident is not None:
            self._thread.join()

    def _main(self) -> None:
        try:
            self._serve()
        except Stopped:
            return
        except DeviceError:
            raise  # the process ends of it: its context is of no more use, and the daemon starts another mover
        except TransportError as error:
            self.board.break_edge(error.edge, error.reason)
        except (RefitdError, OSError, EOFError) as error:
            self.board.break_edge(self.edge, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  reported with type, text and place: a worker must not die in silence
            self.board.break_edge(self.edge, describe(error))
        finally:
            self._release()

    def _serve(self) -> None:
        raise NotImplementedError

    def _interrupt(self) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        """Free what the worker holds; runs in its own thread, last."""


def describe(error: Exception) -> str:
    """Type, text and place of an error that nobody foresaw."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.name}:{place.lineno})"
