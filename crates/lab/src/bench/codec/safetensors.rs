//! A reader of `safetensors` files: the length of a header, the header (a JSON object with the
//! name, format, shape and position of each tensor), and the numbers of the tensors.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Tensors by name.
pub struct Tensors<'a>(BTreeMap<String, Tensor<'a>>);

/// One tensor.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Number format: `BF16`, `F16`, ...
    pub dtype: String,
    /// Lengths of the dimensions; the last dimension is contiguous in memory.
    pub shape: Vec<usize>,
    /// The numbers, little-endian.
    pub bytes: &'a [u8],
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl<'a> Tensors<'a> {
    /// Parses the bytes of a file; `None` if the file is not a valid safetensors file.
    pub fn read(file: &'a [u8]) -> Option<Self> {
        let (length, rest) = file.split_first_chunk::<8>()?;
        let (header, data) =
            rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let entries: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
        let tensors = entries.into_iter().filter(|(name, _)| name != "__metadata__");
        let tensors = tensors.map(|(name, value)| {
            let entry: Entry = serde_json::from_value(value).ok()?;
            let bytes = data.get(entry.data_offsets[0]..entry.data_offsets[1])?;
            Some((name, Tensor { dtype: entry.dtype, shape: entry.shape, bytes }))
        });
        Some(Self(tensors.collect::<Option<_>>()?))
    }

    /// Returns the names of all tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the tensor `name` and its shape; `None` if the tensor is missing, does not have
    /// three dimensions, has no numbers, or has numbers that are not two bytes long.
    pub fn cube(&self, name: &str) -> Option<(&Tensor<'a>, [usize; 3])> {
        let tensor = self.0.get(name)?;
        let shape: [usize; 3] = tensor.shape.as_slice().try_into().ok()?;
        let numbers = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        (numbers > 0 && Some(tensor.bytes.len()) == numbers.checked_mul(2))
            .then_some((tensor, shape))
    }
}
