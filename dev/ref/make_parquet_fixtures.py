"""Writes dev/ref/fixtures/parquet: one table as different programs and options write it, and its texts.

    pip install pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.0
    python dev/ref/make_parquet_fixtures.py

texts.bin: for each row of the table uint32 bytes and the bytes; a null has 0xffffffff and no bytes. Every
<writer>_*.parquet holds this table, but for pyarrow_required (without the nulls), pyarrow_empty (no rows) and
pyarrow_nulls (nulls only). bad_*.parquet are good files that the reader must refuse.
"""

import struct
from pathlib import Path

import duckdb
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


def main():
    OUT.mkdir(exist_ok=True)
    for path in OUT.glob("*"):
        path.unlink()
    write_pyarrow_files()
    write_others()
    with open(OUT / "texts.bin", "wb") as file:
        for text in TEXTS:
            data = b"" if text is None else text.encode()
            file.write(struct.pack("<I", 0xFFFFFFFF if text is None else len(data)) + data)
    sizes = {path.name: path.stat().st_size for path in OUT.iterdir()}
    assert max(sizes.values()) <= MAX_BYTES, sizes
    versions = f"pyarrow {pa.__version__}, polars {polars.__version__}, duckdb {duckdb.__version__}"
    print(f"{OUT}: {len(sizes)} files, {sum(sizes.values())} bytes; {versions}")


if __name__ == "__main__":
    main()
