"""Files behind URLs (in memory, on a local web server, on a local S3 server), compared with local files."""

import functools
import http.server
import json
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern.files import InputError, read_sets
from focalkern.files.paths import NamedFiles, expanded, located, name_of, suffix_of

fsspec = pytest.importorskip("fsspec")

RNG = np.random.default_rng(0)
LABELS = RNG.integers(4, size=120)
LOGITS = (2 * RNG.normal(size=(120, 4)) + 2 * np.eye(4)[LABELS]).astype(np.float32)
SETS = {"val_logits": LOGITS[:60], "val_labels": LABELS[:60], "test_logits": LOGITS[60:], "test_labels": LABELS[60:]}


def write_all(folder):
    """Every format, as local files."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "a.npz", **SETS)
    torch.save({key: torch.from_numpy(value) for key, value in SETS.items()}, folder / "b.pt")
    np.save(folder / "c_logits.npy", LOGITS.astype(">f8"))
    np.save(folder / "c_labels.npy", LABELS)
    np.save(folder / "d_logits.npy", np.asfortranarray(LOGITS))
    np.save(folder / "d_labels.npy", LABELS)
    rows = [",".join(map(repr, [*row, label])) for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True)]
    (folder / "e.csv").write_text("\n".join(["0,1,2,3,label", *rows]) + "\n")
    for part in range(2):
        some = slice(60 * part, 60 * part + 60)
        np.savez(folder / f"part-{part}.npz", logits=LOGITS[some], labels=LABELS[some])
    safetensors = pytest.importorskip("safetensors.torch")
    halves = {key: torch.from_numpy(value) for key, value in SETS.items()}
    halves["val_logits"] = halves["val_logits"].bfloat16()
    safetensors.save_file(halves, folder / "f.safetensors")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "g.parquet" / "deep").mkdir(parents=True)
    table = pytest.importorskip("pyarrow").table
    for part, place in enumerate(("g.parquet/part-0.parquet", "g.parquet/deep/part-1.parquet")):
        some = slice(60 * part, 60 * part + 60)
        columns = {f"logit_{c}": LOGITS[some, c] for c in range(4)} | {"label": LABELS[some], "id": LABELS[some]}
        parquet.write_table(table(columns), folder / place)
    return folder


FILES = ("a.npz", "b.pt", "c_logits.npy", "d_logits.npy", "e.csv", "f.safetensors", "part-*.npz", "g.parquet")


@pytest.fixture
def here(tmp_path):
    return write_all(tmp_path / "local")


@pytest.fixture
def memory(here):
    """The same files in fsspec's memory."""
    system = fsspec.filesystem("memory")
    system.put(f"{here}/", "/bucket/", recursive=True)
    yield "memory://bucket"
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def same(found, expected):
    assert list(found) == list(expected)
    for name, rows in found.items():
        assert torch.equal(rows.input, expected[name].input) and rows.input.dtype == expected[name].input.dtype
        assert torch.equal(rows.labels, expected[name].labels) and rows.kind == expected[name].kind


def assert_all_alike(here, there, **options):
    for name in FILES:
        keys = {"logits_key": "logit_*"} if name == "g.parquet" else {}
        same(read_sets(f"{there}/{name}", **keys, **options), read_sets(f"{here}/{name}", **keys))
    for name in ("c_logits.npy", "d_logits.npy", "f.safetensors"):
        for prefix, rows in fk.study.stream_sets(f"{there}/{name}", **options).items():
            whole = read_sets(f"{here}/{name}")[prefix]
            for first, input, target in rows.shards.batches(3, len(rows) - 5, 7):
                assert torch.equal(input, whole.input[first : first + len(input)])
                assert torch.equal(target, whole.labels[first : first + len(target)])


def test_memory_is_read_as_files_are(here, memory):
    assert_all_alike(here, memory)


def test_a_zarr_store_is_read_as_an_archive(here, memory, tmp_path, monkeypatch):
    zarr = peer("zarr")
    for store in (tmp_path / "h.zarr", tmp_path / "runs" / "h.zarr"):
        group = zarr.open_group(str(store), mode="w")
        for key, value in SETS.items():
            group.create_array(key, data=value, chunks=(7, *value.shape[1:]))
    whole = read_sets(f"{here}/a.npz")
    same(read_sets(tmp_path / "h.zarr"), whole)
    fsspec.filesystem("memory").put(f"{tmp_path}/h.zarr/", "/bucket/h.zarr/", recursive=True)
    same(read_sets(f"{memory}/h.zarr"), whole)
    streamed = fk.study.stream_sets(f"{memory}/h.zarr")["test"]
    assert torch.equal(torch.cat([input for _, input, _ in streamed.shards.batches(0, 60, 9)]), whole["test"].input)
    found = fk.sweep([tmp_path / "runs"], folder=tmp_path / "out")
    assert not found.failed and found.networks == fk.sweep([tmp_path / "runs"], folder=tmp_path / "out").networks
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(InputError, match=r"h\.zarr: zarr is needed to read it: pip install zarr"):
        read_sets(tmp_path / "h.zarr")


def test_names_stand_for_urls(memory, tmp_path):
    numbered = fsspec.filesystem("memory")
    for number in (10, 9):
        numbered.pipe(f"/bucket/deep/val-{number}.npz", b"")
    assert expanded([f"{memory}/deep"]) == [f"memory:///bucket/deep/val-{number}.npz" for number in (9, 10)]
    assert expanded([f"{memory}/**/val-*.npz"]) == expanded([f"{memory}/deep"])
    assert [name.rpartition("/")[2] for name in expanded([memory])] == [
        *("a.npz", "b.pt", "c_logits.npy", "d_logits.npy", "e.csv", "f.safetensors", "g.parquet"),
        *("part-0.npz", "part-1.npz"),
    ]
    assert expanded([f"{memory}/none-*.npz"]) == [f"{memory}/none-*.npz"]
    listed = tmp_path / "files.txt"
    listed.write_text(f"{memory}/part-*.npz\n")
    same(read_sets(f"@{listed}"), read_sets(f"{memory}/part-*.npz"))
    numbered.pipe("/files.txt", listed.read_bytes())
    same(read_sets("@memory://files.txt"), read_sets(f"{memory}/part-*.npz"))
    with pytest.raises(InputError, match=r"^memory://none\.txt: expected a file, found nothing there$"):
        expanded(["@memory://none.txt"])
    # In a web address a question mark starts the query; a path with a colon is no URL.
    assert (
        suffix_of("https://host/val.NPZ?token=a*b.csv") == ".npz" and name_of("s3://b/x_logits.npy").stem == "x_logits"
    )
    assert expanded(["https://host/val.npz?token=1"]) == ["https://host/val.npz?token=1"]
    with pytest.raises(InputError, match=r"^a:b\.npz: expected a file, found nothing there"):
        read_sets("a:b.npz")
    cached = f"simplecache::{memory}/part-*.npz"
    assert expanded([cached]) == [f"simplecache::memory:///bucket/part-{part}.npz" for part in range(2)]
    same(read_sets(cached), read_sets(f"{memory}/part-*.npz"))


def test_options_stay_with_a_url():
    url = located("s3://bucket/val.npz", {"anon": True})
    assert pickle.loads(pickle.dumps(url)).options == {"anon": True} and located(url).options == {"anon": True}
    several = pickle.loads(pickle.dumps(located(NamedFiles(["a.npz", "s3://b/c.npz"]), {"anon": True})))
    assert [getattr(name, "options", None) for name in several.names] == [None, {"anon": True}]
    for wrong in ([], "anon", {1: 2}):
        for call in (read_sets, fk.sweep_one, lambda path, **options: fk.sweep([path], **options)):
            with pytest.raises(TypeError, match="storage_options must be a dict with names as keys, or None, got"):
                call("s3://bucket/val.npz", storage_options=wrong)


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("nothing://bucket/val.npz", None, r"expected a URL that fsspec can open, found: Protocol not known: nothing"),
        ("memory://bucket/absent.npz", None, r"expected a file, found nothing there"),
        ("memory://bucket/absent.txt", None, r"expected \.npz, \.pt"),
        ("memory://bucket/absent_logits.npy", None, r"expected its labels in memory://bucket/absent_labels.npy, found"),
        ("memory://bucket/absent.safetensors", None, r"expected a file, found nothing there"),
        ("memory://bucket/none-*.npz", None, r"expected at least one file, found none that matches"),
    ],
)
def test_errors_name_the_url(url, options, expected):
    with pytest.raises(InputError, match=rf"^{url.replace('*', '[*]')}: {expected}"):
        read_sets(url, storage_options=options)


def test_an_error_names_the_package_of_a_protocol(monkeypatch):
    for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        expected = f"{protocol}://bucket/val.npz: {package} is needed to read it: pip install {package}"
        with pytest.raises(InputError) as caught:
            read_sets(f"{protocol}://bucket/val.npz")
        assert str(caught.value) == expected
        assert fk.sweep([f"{protocol}://bucket/val.npz"]).failed == {
            f"{protocol}://bucket/val.npz": expected.partition(": ")[2]
        }
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match="fsspec is needed to read it: pip install fsspec"):
        read_sets("memory://bucket/val.npz")


def test_damaged_files_behind_urls(memory):
    system = fsspec.filesystem("memory")
    for name in ("c_logits.npy", "f.safetensors"):
        system.pipe(f"/bucket/{name}", system.cat_file(f"/bucket/{name}")[:-100])
    with pytest.raises(
        InputError, match=r"c_logits\.npy: expected 3\d+ bytes for >f8 \[120, 4\], found a truncated file"
    ):
        fk.study.stream_sets(f"{memory}/c_logits.npy")
    with pytest.raises(InputError, match=r"f\.safetensors: .*expected \d+ bytes for rows 0 to 59, found \d+"):
        read_sets(f"{memory}/f.safetensors")
    system.pipe("/bucket/g.safetensors", b"\xff" * 100)
    with pytest.raises(InputError, match=r"g\.safetensors: expected a \.safetensors file, found a damaged"):
        read_sets(f"{memory}/g.safetensors")


def test_a_sweep_reads_urls_and_goes_on(here, memory, tmp_path, monkeypatch):
    local = fk.sweep([f"{here}/a.npz", f"{here}/part-0.npz"])
    names = [f"{memory}/a.npz", f"{memory}/part-0.npz"]
    found = fk.sweep(names, folder=tmp_path / "sweep", storage_options={"skip_instance_cache": False})
    assert [one["path"] for one in found.networks] == names and not found.failed
    assert [one["figures"] for one in found.networks] == [one["figures"] for one in local.networks]
    assert b"skip_instance_cache" not in b"".join(path.read_bytes() for path in (tmp_path / "sweep").rglob("*.*"))
    fsspec.filesystem("memory").pipe("/bucket/a.npz", (here / "part-1.npz").read_bytes())
    fresh = []
    monkeypatch.setattr("focalkern.study.network.run_study", spied(fresh, fk.study.network.run_study))
    again = fk.sweep(names, folder=tmp_path / "sweep")
    assert len(fresh) == 1 and again.networks[0]["n_test"] == 30 and again.networks[1] == found.networks[1]


def spied(calls, function):
    def wrapper(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    return wrapper


def test_the_commands_take_urls(here, memory, tmp_path, run):
    pytest.importorskip("tabulate")
    options = ("--bootstrap", "0", "--candidates", "temperature", "--json")
    saved = tmp_path / "calibrator.json"
    outputs = []
    for place in (here, memory):
        code, out, _ = run("calibrate", f"{place}/a.npz", *options, "--out", saved)
        assert code == 0
        code, more, _ = run("evaluate", f"{place}/part-*.npz", "--calibrator", saved, "--json")
        assert code == 0
        assert run("apply", saved, f"{place}/part-*.npz", "--out", tmp_path / "probs.npz")[0] == 0
        outputs.append((out.replace(str(place), ""), more.replace(str(place), "").replace("//", "/")))
        outputs[-1] += (np.load(tmp_path / "probs.npz")["probs"].tobytes(),)
    assert outputs[0] == outputs[1]
    code, _, err = run("evaluate", f"{memory}/a.npz", "--storage-options", "{")
    assert code == 2 and "expected an object in JSON, found '{'" in err


def test_apply_joins_a_data_set(here, memory, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    fitted = fk.TemperatureScaling().fit(torch.from_numpy(LOGITS), torch.from_numpy(LABELS))
    for place in (here, memory):
        fk.study.apply_calibrator(fitted, f"{place}/g.parquet", tmp_path / "out.parquet", logits_key="logit_*")
        table = parquet.read_table(tmp_path / "out.parquet")
        # deep/part-1.parquet sorts before part-0.parquet
        order = np.r_[60:120, 0:60]
        assert table.column("id").to_numpy().tolist() == LABELS[order].tolist()
        expected = fitted.predict_proba(torch.from_numpy(LOGITS[order].astype(np.float64)))
        assert np.array_equal(table.column("prob_0").to_numpy(), expected[:, 0].numpy())


class Served(http.server.SimpleHTTPRequestHandler):
    """A server without support for ranges: it answers with the whole file."""

    def log_message(self, *arguments):
        pass


def test_a_web_server_without_ranges(here):
    pytest.importorskip("aiohttp")
    pytest.importorskip("requests")
    handler = functools.partial(Served, directory=str(here))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for name in ("a.npz", "c_logits.npy", "f.safetensors"):
            same(read_sets(f"{address}/{name}"), read_sets(here / name))
        streamed = fk.study.stream_sets(f"{address}/c_logits.npy")[""]
        parts = [input for _, input, _ in streamed.shards.batches(0, 120, 50)]
        assert torch.equal(torch.cat(parts), read_sets(here / "c_logits.npy")[""].input)
        server.shutdown()


def test_s3_is_read_as_files_are(here, tmp_path, monkeypatch, run):
    """Against a server of S3 on this machine."""
    moto, s3fs = peer("moto.server"), peer("s3fs")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}"}
        system = s3fs.S3FileSystem(**options)
        system.mkdir("bucket")
        system.put(f"{here}/", "bucket/", recursive=True)
        assert_all_alike(here, "s3://bucket", storage_options=options)
        local = fk.sweep([f"{here}/part-*.npz"])
        found = fk.sweep(["s3://bucket/part-*.npz"], folder=tmp_path / "sweep", storage_options=options, jobs=2)
        for one, other in zip(found.networks, local.networks, strict=True):
            assert one["figures"].keys() == other["figures"].keys()
            for name, figures in one["figures"].items():  # a worker may sum in another order
                assert figures == pytest.approx(other["figures"][name], rel=1e-12)
        np.save(tmp_path / "logits-0.npy", SETS["val_logits"])
        np.save(tmp_path / "labels-0.npy", SETS["val_labels"])
        for name in ("logits-0.npy", "labels-0.npy"):
            system.put(str(tmp_path / name), f"bucket/shards/{name}")
        studies = [
            fk.compare_calibrators(f"{place}/logits-*.npy", resamples=0, candidates=["none", "temperature"], **more)
            for place, more in ((tmp_path, {}), ("s3://bucket/shards", {"storage_options": options}))
        ]
        assert studies[0].to_dict()["rows"] == studies[1].to_dict()["rows"]
        names = ["evaluate", "s3://bucket/a.npz", "--storage-options", json.dumps(options), "--json"]
        assert run(*names)[1].replace("s3://bucket", str(here)) == run("evaluate", here / "a.npz", "--json")[1]
        group = peer("zarr").open_group("s3://bucket/h.zarr", mode="w", storage_options=options)
        for key, value in SETS.items():
            group.create_array(key, data=value)
        same(read_sets("s3://bucket/h.zarr", storage_options=options), read_sets(here / "a.npz"))
        with pytest.raises(InputError, match=r"^s3://bucket/absent\.npz: expected a file, found nothing there"):
            read_sets("s3://bucket/absent.npz", storage_options=options)
    finally:
        server.stop()
