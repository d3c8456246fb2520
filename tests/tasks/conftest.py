"""Prepared data that tests of tasks share."""

import socket

import pytest

from lra.tasks.listops import prepare


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """The variant "test", prepared in this process and without network."""
    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", None)
        prepare("test", str(folder), workers=0)
    return str(folder)
