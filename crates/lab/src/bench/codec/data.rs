//! The keys, values and queries of `bench codec`: recorded in forward passes of a model, or
//! generated.

use super::safetensors::Tensors;
use crate::random::mix;
use ritornello_codec::{Codec, Dtype, SliceKind, SliceShape, decode};
use ritornello_terminal::exit::Failure;
use std::collections::BTreeSet;
use std::path::Path;

/// The built-in sample. `engines/vllm/make_kv.py` wrote it; the command is in `docs/codecs.md`.
static SAMPLE: &[u8] = include_bytes!("../../../fixtures/kv.safetensors");

/// Shape of the synthetic data: heads of keys, heads of queries, numbers per head, tokens.
const SYNTHETIC: (usize, usize, usize, usize) = (8, 16, 128, 512);
/// Number of tokens that have queries: the last tokens of the synthetic data.
const SYNTHETIC_QUERIES: usize = 32;

/// Layers that are measured together.
pub struct DataSet {
    /// Name in reports.
    pub name: String,
    /// The layers of the set.
    pub layers: Vec<Layer>,
}

/// Inputs of one layer's attention, token after token.
pub struct Layer {
    /// The format of the numbers of queries, keys and values.
    pub dtype: Dtype,
    /// Tokens, heads, and numbers per head of keys and values.
    pub shape: [usize; 3],
    /// Heads of the queries, a multiple of the heads of the keys.
    pub query_heads: usize,
    /// Queries of the last tokens.
    pub queries: Vec<u8>,
    /// Keys of all tokens.
    pub keys: Vec<u8>,
    /// Values of all tokens.
    pub values: Vec<u8>,
}

/// Returns the sets of `file` or of the built-in sample, followed by a synthetic set, and the
/// source of the sets that are not synthetic.
pub fn sets(file: Option<&Path>) -> Result<(String, Vec<DataSet>), Failure> {
    let (source, mut sets) = match file {
        None => {
            let source = "keys and values of the demonstration's model after 100 steps of training";
            (source.to_owned(), read(SAMPLE, "the sample")?)
        }
        Some(path) => {
            let bytes = std::fs::read(path).map_err(|error| {
                Failure::unusable(format!("{}: {error}", path.display()), "another --kv")
            })?;
            let source = path.display().to_string();
            let sets = read(&bytes, &source)?;
            (source, sets)
        }
    };
    sets.push(DataSet { name: "outliers".to_owned(), layers: vec![synthetic()] });
    Ok((source, sets))
}

fn read(file: &[u8], source: &str) -> Result<Vec<DataSet>, Failure> {
    let unusable = |what: &str| {
        Failure::unusable(
            format!("{source}: {what}"),
            "a safetensors file of SET.N.q, .k and .v as engines/vllm/make_kv.py makes it",
        )
    };
    let tensors = Tensors::read(file).ok_or_else(|| unusable("this is not a safetensors file"))?;
    let layers: BTreeSet<&str> =
        tensors.names().filter_map(|name| name.strip_suffix(".k")).collect();
    let mut sets: Vec<DataSet> = Vec::new();
    for layer in layers {
        let part = |part: &str| {
            let name = format!("{layer}.{part}");
            tensors.cube(&name).ok_or_else(|| {
                unusable(&format!(
                    "{name} is missing, or not a tensor tokens x heads x numbers of two bytes"
                ))
            })
        };
        let ((q, q_shape), (k, shape), (v, v_shape)) = (part("q")?, part("k")?, part("v")?);
        let dtype = match k.dtype.as_str() {
            "BF16" => Dtype::Bf16,
            "F16" => Dtype::Fp16,
            _ => return Err(unusable(&format!("{layer}.k is neither BF16 nor F16"))),
        };
        let fits = shape == v_shape
            && q_shape[0] <= shape[0]
            && q_shape[1].is_multiple_of(shape[1])
            && q_shape[2] == shape[2]
            && q.dtype == k.dtype
            && v.dtype == k.dtype;
        if !fits {
            return Err(unusable(&format!("{layer}: shapes or dtypes of q, k and v do not match")));
        }
        let name = layer.rsplit_once('.').map_or(layer, |(set, _)| set);
        let layer = Layer {
            dtype,
            shape,
            query_heads: q_shape[1],
            queries: q.bytes.to_vec(),
            keys: k.bytes.to_vec(),
            values: v.bytes.to_vec(),
        };
        match sets.last_mut().filter(|set| set.name == name) {
            Some(set) => set.layers.push(layer),
            None => sets.push(DataSet { name: name.to_owned(), layers: vec![layer] }),
        }
    }
    if sets.is_empty() { Err(unusable("the file has no tensor SET.N.k")) } else { Ok(sets) }
}

impl DataSet {
    /// Returns all slices. A slice is the keys and values of `tokens` tokens of one layer; the last
    /// slice of a layer may have fewer.
    pub fn slices(&self, tokens: u32) -> Vec<(SliceShape, Vec<u8>)> {
        self.layers.iter().flat_map(|layer| layer.slices(tokens)).collect()
    }
}

impl Layer {
    fn slices(&self, tokens: u32) -> Vec<(SliceShape, Vec<u8>)> {
        let channels = self.shape[1] * self.shape[2];
        let bytes = tokens as usize * channels * 2;
        let pages = self.keys.chunks(bytes).zip(self.values.chunks(bytes));
        pages
            .map(|(keys, values)| {
                let kind = SliceKind::KeysValues {
                    tokens: (keys.len() / channels / 2) as u32,
                    channels: channels as u32,
                    layers: 1,
                };
                (SliceShape { dtype: self.dtype, kind }, [keys, values].concat())
            })
            .collect()
    }

    /// Returns the keys and the values after `codec` encoded and decoded them, slice by slice.
    pub fn through(&self, codec: Codec, tokens: u32) -> Result<[Vec<u8>; 2], Failure> {
        let mut parts = [Vec::new(), Vec::new()];
        for (shape, slice) in self.slices(tokens) {
            let mut frame = vec![0; codec.bound(&shape, slice.len())];
            let (used, length) = codec.encode(&shape, &slice, &mut frame)?;
            let mut back = vec![0; slice.len()];
            decode(used.number(), &frame[..length], &mut back)?;
            let (keys, values) = back.split_at(back.len() / 2);
            parts[0].extend(keys);
            parts[1].extend(values);
        }
        Ok(parts)
    }
}

/// Returns normally distributed numbers. The standard deviation of each channel of keys is drawn
/// from a log-normal distribution. One in 32 channels of keys is an outlier, as in large models:
/// its standard deviation is ten times the number drawn, and its mean is equal to this product.
fn synthetic() -> Layer {
    let (heads, query_heads, head_dim, tokens) = SYNTHETIC;
    let mut random = Random(1);
    let channels = heads * head_dim;
    let scales: Vec<(f32, f32)> = (0..channels)
        .map(|at| {
            let plain = (0.5 * random.normal()).exp();
            if at % 32 == 7 { (10.0 * plain, 10.0 * plain) } else { (plain, 0.0) }
        })
        .collect();
    let mut keys = Vec::with_capacity(tokens * channels * 2);
    let mut values = Vec::with_capacity(tokens * channels * 2);
    for _ in 0..tokens {
        for &(scale, centre) in &scales {
            keys.extend(bf16(centre + scale * random.normal()));
            values.extend(bf16(random.normal()));
        }
    }
    let queries = SYNTHETIC_QUERIES * query_heads * head_dim;
    Layer {
        dtype: Dtype::Bf16,
        shape: [tokens, heads, head_dim],
        query_heads,
        queries: (0..queries).flat_map(|_| bf16(0.5 * random.normal())).collect(),
        keys,
        values,
    }
}

fn bf16(number: f32) -> [u8; 2] {
    let bits = number.to_bits();
    ((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
}

struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 += 1;
        (mix(self.0) >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Returns a normally distributed number, by the method of Box and Muller.
    fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }
}
