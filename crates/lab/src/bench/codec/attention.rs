//! The effect of lossy keys and values on attention.

use super::data::Layer;
use ritornello_codec::Dtype;
use ritornello_terminal::exit::Failure;

/// Returns the relative error of a layer's attention output that is computed from `keys` and
/// `values`: the norm of its difference from the correct output, divided by the norm of the correct
/// output. Both norms are over all queries. A query attends to its token and all tokens before it.
///
/// # Errors
/// `Unusable` if the correct output is zero, or an output is not finite.
pub fn error(layer: &Layer, [keys, values]: &[Vec<u8>; 2]) -> Result<f64, Failure> {
    let [tokens, heads, head_dim] = layer.shape;
    let widen = |bytes: &[u8]| numbers(layer.dtype, bytes);
    let queries = widen(&layer.queries);
    let right = (widen(&layer.keys), widen(&layer.values));
    let lossy = (widen(keys), widen(values));
    let rows = queries.len() / layer.query_heads / head_dim;
    let a_head = layer.query_heads / heads;
    let (mut difference, mut norm) = (0.0, 0.0);
    for (at, query) in queries.chunks_exact(head_dim).enumerate() {
        let (row, head) = (at / layer.query_heads, at % layer.query_heads / a_head);
        let seen = tokens - rows + row + 1;
        let of = |(keys, values): &(Vec<f32>, Vec<f32>)| {
            let part = |all: &[f32], token: usize| -> Vec<f32> {
                let from = (token * heads + head) * head_dim;
                all[from..from + head_dim].to_vec()
            };
            attend(query, seen, |token| part(keys, token), |token| part(values, token))
        };
        let (right, lossy) = (of(&right), of(&lossy));
        difference += right.iter().zip(&lossy).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
        norm += right.iter().map(|number| number * number).sum::<f64>();
    }
    let error = (difference / norm).sqrt();
    if error.is_finite() {
        Ok(error)
    } else {
        Err(Failure::unusable("the attention output is zero or not finite", "another --kv"))
    }
}

/// Returns softmax(q K / sqrt d) V over the leading `seen` tokens.
fn attend(
    query: &[f32],
    seen: usize,
    key: impl Fn(usize) -> Vec<f32>,
    value: impl Fn(usize) -> Vec<f32>,
) -> Vec<f64> {
    let product = |key: Vec<f32>| -> f64 {
        query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(b)).sum()
    };
    let root = (query.len() as f64).sqrt();
    let logits: Vec<f64> = (0..seen).map(|token| product(key(token)) / root).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; query.len()];
    for (token, weight) in weights.iter().enumerate() {
        for (out, value) in out.iter_mut().zip(value(token)) {
            *out += weight / sum * f64::from(value);
        }
    }
    out
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let bits = bytes.chunks_exact(2).map(|number| u16::from_le_bytes([number[0], number[1]]));
    match dtype {
        Dtype::Bf16 => bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect(),
        Dtype::Fp16 => bits.map(half).collect(),
    }
}

fn half(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 => f32::NAN,
        _ => (1024.0 + mantissa) * 2f32.powi(exponent - 25),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_is_weighted_mean_of_visible_values() {
        let keys = [[0.0f32, 0.0], [2f32.ln() * 2f32.sqrt(), 5.0], [99.0, 0.0]];
        let values = [[3.0f32, 0.0], [0.0, 3.0], [1e9, 1e9]];
        let out = attend(&[1.0, 0.0], 2, |t| keys[t].to_vec(), |t| values[t].to_vec());
        assert!((out[0] - 1.0).abs() < 1e-6 && (out[1] - 2.0).abs() < 1e-6, "{out:?}");
    }

    #[test]
    fn doubled_values_have_error_one() {
        let ones: Vec<u8> = [0x80, 0x3f].repeat(4 * 2 * 8);
        let twos: Vec<u8> = [0x00, 0x40].repeat(4 * 2 * 8);
        let layer = Layer {
            dtype: Dtype::Bf16,
            shape: [4, 2, 8],
            query_heads: 4,
            queries: [0x80, 0x3f].repeat(2 * 4 * 8),
            keys: ones.clone(),
            values: ones.clone(),
        };
        assert_eq!(error(&layer, &[ones.clone(), ones.clone()]).unwrap(), 0.0);
        assert!((error(&layer, &[ones, twos]).unwrap() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn float16_is_decoded_exactly() {
        assert_eq!(
            [0x3c00, 0xc000, 0x0001, 0x7bff].map(half),
            [1.0, -2.0, 2f32.powi(-24), 65504.0]
        );
    }
}
