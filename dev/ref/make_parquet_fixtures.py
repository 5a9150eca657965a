"""Writes dev/ref/fixtures/parquet: one table as different programs and options write it, and its
texts.

    pip install pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.0 fastparquet==2026.9.0 pandas==3.1.1
    python dev/ref/make_parquet_fixtures.py

texts.bin: for each row of the table uint32 bytes and the bytes; a null has 0xffffffff and no bytes.
Every <writer>_*.parquet holds the table, but for pyarrow_required (without the nulls),
pyarrow_empty (no rows) and pyarrow_nulls (nulls only), pyarrow_checksums (its beginning) and those
that are written by hand here, whose 40 rows are 0 to 39: what the format allows and none of these
programs writes. bad_*.parquet must be refused.
"""

import gzip
import struct
from pathlib import Path

import duckdb
import fastparquet
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).parent / "fixtures" / "parquet"
MAX_BYTES = 20000  # of a file

TEXTS = [
    "", "one", None, "two words", "Grüße, мир, 世界, 🦜🦜, e\u0301", "\x00zero\x00inside\x00",
    "line\nline\r\nline\ttab", None, None, "prefix", "prefix and more", "prefix and more of it", "prefix",
    *[f"The hedgehog number {i % 7} met number {i % 5}." for i in range(40)],
    *[None] * 20,
    *[f"{i} " * (i * i % 37) for i in range(60)],
    "a long line. " * 90,
    "",
]  # fmt: skip


def table(texts):
    n = len(texts)
    return pa.table({
        "id": pa.array(range(n), pa.int64()),
        "text": pa.array(texts, pa.string()),
        "meta": pa.array([{"language": "en", "score": i / 7} for i in range(n)]),
        "tags": pa.array([["a", "b"][: i % 3] for i in range(n)], pa.list_(pa.string())),
        "url": pa.array([f"https://example.org/{i}" for i in range(n)], pa.large_string()),
        "raw": pa.array([b"bytes"] * n, pa.binary()),
    })  # fmt: skip


def write_pyarrow(name, texts=TEXTS, schema=None, columns=("id", "text", "meta", "tags", "url", "raw"), **options):
    data = table(texts).select(list(columns))
    if schema is not None:
        data = data.cast(schema)
    options = {"compression": "none", "use_dictionary": False, **options}
    pq.write_table(data, OUT / f"{name}.parquet", **options)


def write_pyarrow_files():
    encoded = {"use_dictionary": False, "column_encoding": None}
    few = ("text", "url")  # smaller files
    write_pyarrow("pyarrow_plain")
    write_pyarrow("pyarrow_snappy", columns=few, compression="snappy", use_dictionary=True)
    write_pyarrow("pyarrow_zstd", columns=few, compression="zstd", use_dictionary=True, data_page_version="2.0")
    write_pyarrow("pyarrow_gzip", columns=few, compression="gzip", data_page_version="2.0", data_page_size=300)
    write_pyarrow("pyarrow_gzip_pages", columns=few, compression="gzip", data_page_size=300, write_batch_size=5)
    # the dictionary gets full, and what follows in the row group is PLAIN
    write_pyarrow("pyarrow_fallback", columns=few, compression="snappy", use_dictionary=True, write_batch_size=4,
                  dictionary_pagesize_limit=400, data_page_size=200)  # fmt: skip
    for version in ("1.0", "2.0"):
        for encoding, short in (("DELTA_LENGTH_BYTE_ARRAY", "lengths"), ("DELTA_BYTE_ARRAY", "prefixes")):
            encoded["column_encoding"] = {"text": encoding}
            write_pyarrow(f"pyarrow_{short}_v{version[0]}", columns=("text",), data_page_version=version,
                          write_batch_size=50, data_page_size=1500, compression="zstd", **encoded)  # fmt: skip
    write_pyarrow("pyarrow_groups", columns=("text",), row_group_size=7, use_dictionary=True, compression="zstd")
    write_pyarrow("pyarrow_checksums", columns=("text",), texts=TEXTS[:16], write_page_checksum=True,
                  row_group_size=9, store_schema=False)  # fmt: skip
    required = pa.schema([pa.field("text", pa.string(), nullable=False)])
    present = [text for text in TEXTS if text is not None]
    write_pyarrow("pyarrow_required", present, required, columns=("text",), compression="snappy")
    write_pyarrow("pyarrow_required_v2", present, required, columns=("text",), data_page_version="2.0",
                  use_dictionary=True, compression="zstd")  # fmt: skip
    write_pyarrow("pyarrow_empty", [], columns=few)
    for version in ("1.0", "2.0"):
        write_pyarrow(f"pyarrow_nulls_v{version[0]}", [None] * 100, columns=("text",), compression="snappy",
                      use_dictionary=True, data_page_version=version)  # fmt: skip
    write_pyarrow("bad_lz4", texts=TEXTS[:9], columns=("text",), compression="lz4")


def write_others():
    data = table(TEXTS).select(["text", "url"])
    frame = polars.from_arrow(data)
    frame.write_parquet(OUT / "polars_zstd.parquet", compression="zstd")
    frame.write_parquet(OUT / "polars_groups.parquet", compression="snappy", row_group_size=50, data_page_size=400)
    for name, options in (
        ("snappy", "CODEC 'snappy'"),
        ("zstd_v2", "CODEC 'zstd', PARQUET_VERSION 'V2', ROW_GROUP_SIZE 50"),
        ("gzip_v2", "CODEC 'gzip', PARQUET_VERSION 'V2', DICTIONARY_SIZE_LIMIT 1"),
    ):
        duckdb.sql(f"COPY (SELECT * FROM data) TO '{OUT}/duckdb_{name}.parquet' (FORMAT parquet, {options})")


    fastparquet.write(OUT / "fastparquet_snappy.parquet", pandas.DataFrame({"text": pandas.Series(TEXTS, dtype=object)}),
                      compression="SNAPPY", object_encoding="utf8", has_nulls=True)  # fmt: skip


# ---- by hand, with Thrift's compact protocol: numbers of 32 and 64 bits, strings, structs (dict)
# and lists


class I64(int):
    pass


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def thrift(value):
    """The type of a value, and its bytes."""
    if isinstance(value, int):
        return 6 if isinstance(value, I64) else 5, varint(value << 1)
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    if isinstance(value, list):
        items = [thrift(item) for item in value]
        return 9, bytes([0xF0 | items[0][0]]) + varint(len(items)) + b"".join(data for _, data in items)
    fields = [(key, *thrift(item)) for key, item in value.items()]
    return 12, b"".join(bytes([kind]) + varint(key << 1) + data for key, kind, data in fields) + b"\0"


def page(kind, plain_bytes, stored, about):
    """`about` is the part of the header for this kind of page, under its number."""
    return thrift({1: kind, 2: plain_bytes, 3: len(stored), **about})[1] + stored


def plain(rows):
    return b"".join(struct.pack("<I", len(str(i))) + str(i).encode() for i in rows)


def write_hand(name, pages, rows, codec, repetition):
    data = b"".join(pages)
    size, begin, count = I64(len(data)), I64(4), I64(rows)
    column = {1: 6, 2: [0], 3: [b"text"], 4: codec, 5: count, 6: size, 7: size, 9: begin}
    schema = [{4: b"schema", 5: 1}, {1: 6, 3: repetition, 4: b"text", 6: 0}]
    footer = thrift({1: 1, 2: schema, 3: count, 4: [{1: [{2: begin, 3: column}], 2: size, 3: count}]})[1]
    path = OUT / f"{name}.parquet"
    path.write_bytes(b"PAR1" + data + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path


def data_page(count, body, encoding=0, level_encoding=3):
    """Version 1, not compressed."""
    return page(0, len(body), body, {5: {1: count, 2: encoding, 3: level_encoding, 4: 3}})


def levels(runs):
    return struct.pack("<I", len(runs)) + runs


def write_hand_files():
    required, optional = 0, 1
    # an index page; statistics that are longer than the page; two GZIP members; levels as a run,
    # and packed
    first = levels(varint(20 << 1) + b"\1") + plain(range(20))
    second = levels(varint(3 << 1 | 1) + b"\xff\xff\x0f") + plain(range(20, 40))
    members = gzip.compress(first[:50], mtime=0) + gzip.compress(first[50:], mtime=0)
    about = {1: 20, 2: 0, 3: 3, 4: 3}
    odd = write_hand("hand_odd", [
        page(1, 5, b"index", {6: {}}),
        page(0, len(first), members, {5: {**about, 5: {1: b"z" * 5000}}}),
        page(0, len(second), gzip.compress(second, mtime=0), {5: about}),
    ], 40, 2, optional)  # fmt: skip
    # as long ago: the dictionary at data_page_offset, and called PLAIN_DICTIONARY
    words = plain(range(40))
    packed = sum(i << 6 * i for i in range(40)).to_bytes(30, "little")
    old = write_hand("hand_dictionary", [
        page(2, len(words), words, {7: {1: 40, 2: 2}}),
        data_page(40, b"\6" + varint(5 << 1 | 1) + packed, encoding=2),
    ], 40, 0, required)  # fmt: skip
    for path in (odd, old):
        assert pq.read_table(path).column("text").to_pylist() == [str(i) for i in range(40)], path
    write_hand("bad_level_encoding", [data_page(8, b"\xff" + plain(range(8)), level_encoding=4)], 8, 0, optional)
    write_hand("bad_level", [data_page(8, levels(varint(8 << 1) + b"\2") + plain(range(8)))], 8, 0, optional)
    write_hand("bad_rest", [data_page(8, plain(range(8)) + b"\1\0\0\0x")], 8, 0, required)
    write_hand("bad_missing", [data_page(7, plain(range(7)))], 8, 0, required)
    write_hand("bad_index", [
        page(2, len(words), words, {7: {1: 40, 2: 0}}), data_page(8, b"\6" + varint(8 << 1) + b"\x28", encoding=8),
    ], 8, 0, required)  # fmt: skip
    write_hand("bad_no_dictionary", [data_page(8, b"\6" + varint(8 << 1) + b"\1", encoding=8)], 8, 0, required)
    deltas = varint(128) + varint(4) + varint(2)  # a block, its miniblocks, numbers
    prefixes = deltas + b"\0" + varint(2 << 1) + b"\0\0\0\0"  # 0 2: more than the text before has
    lengths = deltas + varint(1 << 1) + b"\0" + b"\0\0\0\0"  # 1 1
    write_hand("bad_prefix", [data_page(2, prefixes + lengths + b"ab", encoding=7)], 2, 0, required)
    short = deltas + varint(1 << 1) + b"\0" + b"\x08\0\0\0" + b"\1" * 12  # the miniblock has 32 bytes
    write_hand("bad_lengths", [data_page(2, short, encoding=6)], 2, 0, required)
    longer = page(0, 41, plain(range(8)) + b"x", {5: {1: 8, 2: 0, 3: 3, 4: 3}})[:-1]
    write_hand("bad_stored", [longer], 8, 0, required)
    many = page(2, len(words), words, {7: {1: 1 << 30, 2: 0}})
    write_hand("bad_dictionary", [many, data_page(8, b"\6" + varint(8 << 1) + b"\1", encoding=8)], 8, 0, required)
    write_hand("bad_encoding", [data_page(8, plain(range(8)), encoding=9)], 8, 0, required)
    write_hand("bad_size", [page(0, 1 << 30, plain(range(8)), {5: {1: 8, 2: 0, 3: 3, 4: 3}})], 8, 0, required)


def main():
    OUT.mkdir(exist_ok=True)
    for path in OUT.glob("*"):
        path.unlink()
    write_pyarrow_files()
    write_others()
    write_hand_files()
    with open(OUT / "texts.bin", "wb") as file:
        for text in TEXTS:
            data = b"" if text is None else text.encode()
            file.write(struct.pack("<I", 0xFFFFFFFF if text is None else len(data)) + data)
    sizes = {path.name: path.stat().st_size for path in OUT.iterdir()}
    assert max(sizes.values()) <= MAX_BYTES, sizes
    versions = f"fastparquet {fastparquet.__version__}, pyarrow {pa.__version__}, polars {polars.__version__}, duckdb {duckdb.__version__}"
    print(f"{OUT}: {len(sizes)} files, {sum(sizes.values())} bytes; {versions}")


if __name__ == "__main__":
    main()
