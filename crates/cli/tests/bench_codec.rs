//! `bench codec` on little data: its report, and the files that it refuses. No test checks whether
//! a rate is good.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{ritornello, scratch, text};
use serde_json::Value;

const SMALL: [&str; 7] = ["bench", "codec", "--total", "1MiB", "--runs", "1", "--json"];

#[test]
fn codec_sizes_and_attention_errors_stay_in_bounds() {
    let answer = ritornello(&SMALL);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let json: Value = serde_json::from_str(&answer.out).unwrap();
    let rows = json["rows"].as_array().unwrap();
    for data in ["trained", "other", "outliers"] {
        for codec in ["split", "zstd", "int8", "int4"] {
            let of = |row: &&Value| row["data"] == data && row["codec"] == codec;
            let row = rows.iter().find(of).unwrap_or_else(|| panic!("{codec} on {data}"));
            let number = |name: &str| row[name].as_f64().unwrap();
            let (size, error) = match codec {
                "split" => (0.76, 0.0),
                "zstd" => (0.70, 0.0),
                "int8" => (0.53, 0.01),
                _ => (0.32, 0.2),
            };
            assert!(number("size_ratio") <= size, "{row}");
            assert!(number("attention_error") <= error, "{row}");
            assert_eq!(number("attention_error") > 0.0, error > 0.0, "{row}");
            for rate in ["encode_gb_s", "decode_gb_s", "memcpy_gb_s"] {
                assert!(number(rate) > 0.0, "{row}");
            }
            assert!(row["kernel"].is_string());
        }
    }
}

#[test]
fn invalid_kv_file_is_refused_with_reason() {
    let dir = scratch();
    let path = dir.path().join("kv.safetensors");
    let header = r#"{"a.0.k":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]}}"#;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
    for (content, said) in [(&b"noise"[..], "not a safetensors file"), (&tensors[..], "a.0.q")] {
        std::fs::write(&path, content).unwrap();
        let answer = ritornello(&[&SMALL[..], &["--kv", text(&path)]].concat());
        assert_eq!(answer.code, 2, "{}{}", answer.out, answer.err);
        assert!(answer.err.contains(said), "{}", answer.err);
    }
}
