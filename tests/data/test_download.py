"""Downloads, from files on this machine: nothing here uses a network."""

import hashlib
import io
import tarfile

import pytest

from hyperpush.data import download
from hyperpush.errors import InvalidInput

pytest.importorskip("pooch")


def record(label):
    return bytes([label]) + bytes(3072)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive like CIFAR-10's, with a member that points out of its folder, and its entry among the known ones."""
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for name, content in (
            ("cifar-10-batches-bin/test_batch.bin", record(3)),
            ("../data_batch_1.bin", record(4)),
            ("cifar-10-batches-bin/readme.html", b"read me"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path / "data"))
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(download.KNOWN, "cifar10", {"https://example.invalid/cifar-10-binary.tar.gz": checksum})
    return path


@pytest.fixture
def no_network(monkeypatch, archive):
    """pooch downloads through this; it checks what comes."""
    import pooch

    def fetched(url, output, pooch):
        with open(output, "wb") as file:  # noqa: PTH123 - pooch hands over a name
            file.write(archive.read_bytes())

    monkeypatch.setattr(pooch.core, "choose_downloader", lambda *_, **__: fetched)


@pytest.mark.usefixtures("no_network")
def test_files_land_where_they_are_read(archive):
    from hyperpush.data.sources import load

    folder = archive.parent / "data" / "cifar10"
    assert sorted(download.get("cifar10")) == [folder / "data_batch_1.bin", folder / "test_batch.bin"]
    assert not (archive.parent / "data" / "data_batch_1.bin").exists()
    assert list(load("cifar10").labels) == [4, 3]
    assert not list(folder.glob("*.part"))


@pytest.mark.usefixtures("no_network")
def test_another_content_is_refused_and_not_kept(archive, monkeypatch):
    monkeypatch.setitem(download.KNOWN, "cifar10", {"https://example.invalid/cifar-10-binary.tar.gz": "0" * 64})
    with pytest.raises(InvalidInput, match=r"data: got 'cifar10'; allowed: a download that can be completed: .*hash"):
        download.get("cifar10")
    assert not list((archive.parent / "data").rglob("*.bin"))
    assert not list((archive.parent / "data").rglob("*.gz"))


def test_bad_input_is_named(monkeypatch):
    with pytest.raises(InvalidInput, match=r"data: got 'cifar1'; allowed: a9a, cifar10, .*did you mean 'cifar10'"):
        download.get("cifar1")
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got None; allowed: a folder to download into"):
        download.get("mnist")
    assert all(len(checksum) == 64 for own in download.KNOWN.values() for checksum in own.values())
