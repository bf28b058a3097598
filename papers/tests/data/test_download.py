"""Downloads from files on this machine: no test here uses a network."""

import hashlib
import io
import re
import signal
import tarfile
import zipfile

import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.cli import app as cli
from hyperpush_papers.common.data import catalog, download


def record(label):
    return bytes([label]) + bytes(3072)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Create an archive like CIFAR-10's with a member outside its folder, and register it as a known data set."""
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
    """Let pooch read files beside the archive instead of downloading them; return the list of requested addresses."""
    import pooch

    asked = []

    def fetched(url, output, pooch):
        asked.append(url)
        with open(output, "wb") as file:  # noqa: PTH123 - pooch hands over a name
            file.write((archive.parent / url.rpartition("/")[2]).read_bytes())

    monkeypatch.setattr(pooch.core, "choose_downloader", lambda *_, **__: fetched)
    return asked


@pytest.mark.usefixtures("no_network")
def test_files_land_where_they_are_read(archive):
    from hyperpush_papers.common.data.sources import load

    folder = archive.parent / "data" / "cifar10"
    assert sorted(download.get("cifar10")) == [folder / "data_batch_1.bin", folder / "test_batch.bin"]
    assert not (archive.parent / "data" / "data_batch_1.bin").exists()
    assert list(load("cifar10").labels) == [4, 3]
    assert sorted(each.name for each in folder.iterdir()) == ["data_batch_1.bin", "test_batch.bin"]
    assert [each.name for each in folder.parent.iterdir()] == ["cifar10"]


@pytest.mark.usefixtures("no_network")
def test_another_content_is_refused_and_not_kept(archive, monkeypatch):
    monkeypatch.setitem(download.KNOWN, "cifar10", {"https://example.invalid/cifar-10-binary.tar.gz": "0" * 64})
    with pytest.raises(InvalidInput, match=r"data: got 'cifar10'; allowed: a download that can be completed: .*hash"):
        download.get("cifar10")
    assert not list((archive.parent / "data").iterdir())


def test_a_zipped_set_is_unpacked_and_not_fetched_twice(archive, no_network, monkeypatch, tmp_path):
    from hyperpush_papers.common.data.sources import published_files

    names = published_files()["emnist"][1]
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as made:
        for name in (*names, "emnist-letters-train-images-idx3-ubyte"):
            made.writestr(f"gzip/{name}.gz", name.encode())
    checksum = hashlib.md5((tmp_path / "gzip.zip").read_bytes()).hexdigest()
    monkeypatch.setitem(download.KNOWN, "emnist", {"https://example.invalid/gzip.zip": f"md5:{checksum}"})
    to = tmp_path / "new" / "folder"
    found = download.get("emnist", to)
    assert found == [to / "emnist" / f"{name}.gz" for name in names]
    assert sorted(found) == sorted((to / "emnist").iterdir())
    assert found[0].read_bytes() == names[0].encode()
    assert download.get("emnist", to) == found
    assert len(no_network) == 1


def test_all_files_arrive_or_none(archive, no_network, monkeypatch, tmp_path):
    for name in ("a9a", "a9a.t"):
        (tmp_path / name).write_text(f"+1 1:{len(name)}\n")
    checksums = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a9a", "a9a.t")]
    addresses = [f"https://example.invalid/{name}" for name in ("a9a", "a9a.t")]
    monkeypatch.setitem(download.KNOWN, "a9a", dict(zip(addresses, (checksums[0], "0" * 64), strict=True)))
    with pytest.raises(InvalidInput, match=r"a download that can be completed: https://example.invalid/a9a.t \("):
        download.get("a9a", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(download.KNOWN, "a9a", dict(zip(addresses, checksums, strict=True)))
    (tmp_path / "new" / "a9a").mkdir(parents=True)
    # a file that differs from the published one is fetched again
    (tmp_path / "new" / "a9a" / "a9a").write_text("broken")
    (tmp_path / "new" / "a9a" / "a9a.t").write_text("+1 1:5\n")
    no_network.clear()
    assert [path.read_text() for path in download.get("a9a", tmp_path / "new")] == ["+1 1:3\n", "+1 1:5\n"]
    assert no_network == addresses[:1]
    with pytest.raises(InvalidInput, match=r"--to: got .*a folder that can be written"):
        download.get("a9a", tmp_path / "new" / "a9a" / "a9a")


def test_the_catalog_says_what_is_where(archive, monkeypatch, tmp_path):
    (tmp_path / "data" / "cifar10").mkdir()
    (tmp_path / "data" / "cifar10" / "test_batch.bin.xz").touch()
    (tmp_path / "data" / "a9a").mkdir()
    for name in ("a9a", "a9a.t"):
        (tmp_path / "data" / "a9a" / name).touch()
    found = {each.name: each for each in catalog.entries()}
    here = {name: each.here for name, each in found.items()}
    absent = dict.fromkeys(("mnist", "emnist", "cifar100", "shakespeare", "los-loop"), "no")
    assert here == {"digits": "yes", "cifar10": "1 of 6 files", "a9a": "yes", **absent}
    assert "cifar10/data_batch_3.bin" in found["cifar10"].files
    assert {name for name, each in found.items() if each.download == "by hand"} == {"shakespeare", "los-loop"}
    monkeypatch.delenv("HYPERPUSH_DATA")
    assert {each.here for each in catalog.entries()} == {"yes", "no"}


def test_the_command_lists_fetches_and_ends_clearly(archive, no_network, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", *arguments])
        return int(caught.value.code or 0), *capsys.readouterr()

    code, out, _ = call()
    assert code == 0
    assert "emnist/emnist-byclass-test-labels-idx1-ubyte" in out
    new = tmp_path / "new"
    assert call("get", "cifar10", "--to", str(new))[:2] == (
        0,
        f"{new}/cifar10/data_batch_1.bin\n{new}/cifar10/test_batch.bin\n",
    )
    code, out, err = call("get", "a9a", "--to", str(tmp_path / "other"))  # the address does not exist
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: data: got 'a9a'; allowed: a download that can be completed: https")
    assert "Traceback" not in err
    assert not (tmp_path / "other").exists()
    for wrong in (["get", "a9"], ["get"], ["put", "a9a"]):
        code, _, err = call(*wrong)
        assert (code, err.count("\n")) == (2, 1)


def test_bad_input_is_named(monkeypatch):
    with pytest.raises(InvalidInput, match=r"data: got 'cifar1'; allowed: a9a, cifar10, .*did you mean 'cifar10'"):
        download.get("cifar1")
    monkeypatch.delenv("HYPERPUSH_DATA", raising=False)
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got None; allowed: a folder to download into"):
        download.get("mnist")
    checksums = [checksum for own in download.KNOWN.values() for checksum in own.values()]
    assert all(re.fullmatch(r"[0-9a-f]{64}|md5:[0-9a-f]{32}", checksum) for checksum in checksums)
