//! Makes values of messages by answering the calls of their `Deserialize`. A new kind of request is
//! therefore fuzzed without an entry here, unless it has a field of a primitive type that no other
//! message has.

use serde::de::value::{Error, U32Deserializer};
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, Error>;

/// Values of number fields: small numbers, and large numbers that mutations of small numbers
/// rarely give.
const NUMBERS: [u64; 10] = [0, 1, 1, 2, 3, 18, 1 << 20, 1 << 33, u64::MAX - 1, u64::MAX];
/// Lengths of byte strings; each is a valid length of a key.
const LENGTHS: [usize; 4] = [8, 16, 16, 64];
/// Maximum attempts to make the requested values of one variant.
const ATTEMPTS: usize = 1000;
/// Maximum length of a list or a map.
const LIST_MAX: u64 = 3;
static BYTES: [u8; 64] = [2; 64];

/// Structs whose fields are not generated: for the name of each struct, encoded values, of which
/// the generator picks one.
pub(super) type Known<'a> = &'a [(&'a str, Vec<Vec<u8>>)];

/// A deserializer without input.
pub(super) struct Generator<'a> {
    known: Known<'a>,
    dice: u64,
    /// The variant to choose for the outermost enum; `None` after the choice.
    variant: Option<u32>,
    /// Number of variants of the outermost enum.
    variants: usize,
    /// Whether enums within messages are always their first variant.
    nested_first: bool,
    /// Names of the variants of each enum met, by the name of the enum.
    enums: Enums,
}

/// Names of the variants of enums, by the name of the enum.
pub(super) type Enums = BTreeMap<&'static str, &'static [&'static str]>;

impl<'a> Generator<'a> {
    pub(super) fn new(known: Known<'a>) -> Self {
        Self {
            known,
            dice: 1,
            variant: None,
            variants: 0,
            nested_first: false,
            enums: Enums::new(),
        }
    }

    /// A generator for which each enum within a message is the first variant, so that a variant
    /// appended to such an enum changes no generated value.
    #[cfg(test)]
    pub(super) fn with_first_nested(known: Known<'a>) -> Self {
        Self { nested_first: true, ..Self::new(known) }
    }

    /// Returns the enum that `make` deserializes, and the enums within it. If `make` fails, the
    /// enums that it met before the failure are included.
    #[cfg(test)]
    pub(super) fn enums(make: impl Fn(&mut Self)) -> Enums {
        let mut generator = Self::new(&[]);
        for variant in 0.. {
            for _ in 0..ATTEMPTS {
                generator.variant = Some(variant);
                make(&mut generator);
            }
            if variant as usize + 1 >= generator.variants {
                break;
            }
        }
        generator.enums
    }

    /// Passes `count` values of each variant of an enum to `each`. `make` deserializes a value, and
    /// returns `None` for fields that the type's `Deserialize` rejects.
    pub(super) fn each_variant<T>(
        &mut self,
        count: usize,
        make: impl Fn(&mut Self) -> Option<T>,
        mut each: impl FnMut(T),
    ) {
        for variant in 0.. {
            let made = (0..ATTEMPTS).filter_map(|_| {
                self.variant = Some(variant);
                make(self)
            });
            let mut left = count;
            for value in made.take(count) {
                each(value);
                left -= 1;
            }
            assert_eq!(left, 0, "variant {variant} cannot be made");
            if variant as usize + 1 >= self.variants {
                return;
            }
        }
    }

    /// A number below `bound`, from the high bits of a linear congruential generator.
    fn roll(&mut self, bound: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.dice >> 33) % bound
    }

    fn number(&mut self) -> u64 {
        NUMBERS[self.roll(NUMBERS.len() as u64) as usize]
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty,)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
            visitor.$visit(self.number() as $type)
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Generator<'de> {
    type Error = Error;

    fn is_human_readable(&self) -> bool {
        false
    }

    numbers! {
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_f64 visit_f64 f64,
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_bool(self.roll(2) == 1)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_borrowed_str("/a word")
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        let length = LENGTHS[self.roll(LENGTHS.len() as u64) as usize];
        visitor.visit_borrowed_bytes(&BYTES[..length])
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        if self.roll(2) == 0 { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &str, visitor: V) -> Result<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        let left = self.roll(LIST_MAX + 1) as usize;
        visitor.visit_seq(Elements { generator: self, left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value> {
        visitor.visit_seq(Elements { generator: self, left })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        let left = self.roll(LIST_MAX + 1) as usize;
        visitor.visit_map(Elements { generator: self, left })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        let known = self.known.iter().find(|known| known.0 == name);
        let Some((_, values)) = known else { return self.deserialize_tuple(fields.len(), visitor) };
        let value = &values[self.roll(values.len() as u64) as usize];
        let mut input = postcard::Deserializer::from_bytes(value);
        input.deserialize_struct(name, fields, visitor).map_err(Error::custom)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        let same = self.enums.insert(name, variants).is_none_or(|known| known == variants);
        assert!(same, "two enums have the name {name}");
        if self.variant.is_some() {
            self.variants = variants.len();
        }
        visitor.visit_enum(Variant { count: variants.len() as u64, generator: self })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value> {
        Err(Error::custom("no message has a field of this type yet: add the type to `Generator`"))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 char byte_buf unit unit_struct tuple_struct identifier
        ignored_any
    }
}

/// The elements of a list, a tuple or a map, or the fields of a struct.
struct Elements<'g, 'de> {
    generator: &'g mut Generator<'de>,
    left: usize,
}

impl<'de> SeqAccess<'de> for Elements<'_, 'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        seed.deserialize(&mut *self.generator).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for Elements<'_, 'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>> {
        self.next_element_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value> {
        seed.deserialize(&mut *self.generator)
    }
}

/// Chooses one of `count` variants of an enum, or takes [`Generator::variant`] if it is set, and
/// generates the variant's fields.
struct Variant<'g, 'de> {
    generator: &'g mut Generator<'de>,
    count: u64,
}

impl<'g, 'de> EnumAccess<'de> for Variant<'g, 'de> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self)> {
        let wanted = self.generator.variant.take();
        let nested = if self.generator.nested_first { 1 } else { self.count };
        let number = wanted.unwrap_or_else(|| self.generator.roll(nested) as u32);
        let number: U32Deserializer<Error> = number.into_deserializer();
        Ok((seed.deserialize(number)?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, 'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<()> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value> {
        seed.deserialize(self.generator)
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value> {
        self.generator.deserialize_tuple(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        self.generator.deserialize_tuple(fields.len(), visitor)
    }
}
