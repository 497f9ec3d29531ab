//! The fields in which two scopes differ.

use crate::Scope;
use serde::{Deserialize, Serialize};

/// Maximum characters of a value. A model's configuration may have thousands.
const VALUE_CHARS_MAX: usize = 64;
/// Maximum differences that are returned. A scope may have millions of entries in `extra`.
const DIFFERENCES_MAX: usize = 64;

/// A field in which two scopes differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldDifference {
    /// Name of the field; `extra.NAME`, cut after 64 characters, for an entry of [`Scope::extra`].
    pub field: String,
    /// Value of the first scope, cut after 64 characters; `none` if it is empty, and `hidden` for a
    /// salt.
    pub asked: String,
    /// Value of the second scope, in the same form.
    pub stored: String,
}

impl Scope {
    /// The fields in which the identities of this scope and `other` differ, at most 64.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<FieldDifference> {
        let (asked, stored) = (self.fields(), other.fields());
        let mut differences: Vec<FieldDifference> = asked
            .into_iter()
            .zip(stored)
            .filter(|((_, asked), (_, stored))| asked != stored)
            .map(|((field, asked), (_, stored))| match field {
                "salt" => difference(field, secret(&asked), secret(&stored)),
                _ => difference(field, &asked, &stored),
            })
            .collect();
        let names = self.extra.keys().chain(other.extra.keys());
        for name in names.collect::<std::collections::BTreeSet<_>>() {
            let value = |scope: &Self| scope.extra.get(name).cloned().unwrap_or_default();
            let (asked, stored) = (value(self), value(other));
            if asked != stored {
                if differences.len() == DIFFERENCES_MAX {
                    break;
                }
                differences.push(difference(&shown(&format!("extra.{name}")), &asked, &stored));
            }
        }
        differences
    }

    /// The values of all fields but `extra`, in the form in which the identity has them.
    fn fields(&self) -> [(&'static str, String); 16] {
        // Names all fields, so that a new field is a compile error until it is compared here.
        let Self {
            model,
            weights,
            adapter,
            dtype,
            kv_scale,
            page_tokens,
            layers,
            kv_heads,
            head_dim,
            hash_algorithm,
            salt,
            epoch,
            part,
            extra: _,
            layout: _,
            page_bytes,
            chained,
        } = self;
        let range = |(first, end): (u32, u32)| format!("{first} to {end}");
        let page_bytes = self.resolved_page_bytes().ok().or(*page_bytes);
        [
            ("model", model.clone()),
            ("weights", hex(weights)),
            ("adapter", adapter.clone()),
            ("dtype", dtype.clone()),
            ("kv_scale", kv_scale.clone()),
            ("page_tokens", page_tokens.to_string()),
            ("layers", range(*layers)),
            ("kv_heads", range(*kv_heads)),
            ("head_dim", head_dim.to_string()),
            ("hash_algorithm", hash_algorithm.clone()),
            ("salt", hex(salt)),
            ("epoch", hex(epoch)),
            ("part", part.to_string()),
            ("layout", self.canonical_layout().to_owned()),
            ("page_bytes", page_bytes.map(|bytes| bytes.to_string()).unwrap_or_default()),
            ("chained", chained.to_string()),
        ]
    }
}

fn difference(field: &str, asked: &str, stored: &str) -> FieldDifference {
    FieldDifference { field: field.to_owned(), asked: shown(asked), stored: shown(stored) }
}

fn shown(value: &str) -> String {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        _ if value.is_empty() => "none".to_owned(),
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

/// Hides a salt: it separates tenants, and keys can be computed from it.
fn secret(value: &str) -> &'static str {
    if value.is_empty() { "" } else { "hidden" }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(asked: &Scope, stored: &Scope) -> Vec<(String, String, String)> {
        let differences = asked.differences(stored).into_iter();
        differences.map(|found| (found.field, found.asked, found.stored)).collect()
    }

    fn triple(field: &str, asked: &str, stored: &str) -> (String, String, String) {
        (field.to_owned(), asked.to_owned(), stored.to_owned())
    }

    #[test]
    fn each_differing_field_has_both_values() {
        let base = Scope::opaque("a", 4096, true);
        assert_eq!(of(&base, &base), []);
        let other = Scope { dtype: "bfloat16".into(), layers: (0, 4), ..base.clone() };
        let expected = [triple("dtype", "none", "bfloat16"), triple("layers", "0 to 0", "0 to 4")];
        assert_eq!(of(&base, &other), expected);
        let isa = Scope { extra: [("isa".into(), "amx".into())].into(), ..base.clone() };
        assert_eq!(of(&base, &isa), [triple("extra.isa", "none", "amx")]);
    }

    #[test]
    fn salt_is_hidden_and_long_value_is_cut() {
        let base = Scope::opaque("a", 4096, true);
        let salted = Scope { salt: b"tenant".to_vec(), ..base.clone() };
        assert_eq!(of(&base, &salted), [triple("salt", "none", "hidden")]);
        let resalted = Scope { salt: b"another".to_vec(), ..base.clone() };
        assert_eq!(of(&salted, &resalted), [triple("salt", "hidden", "hidden")]);
        let long = Scope { model: "é".repeat(100), ..base.clone() };
        assert_eq!(of(&base, &long), [triple("model", "a", &format!("{}...", "é".repeat(64)))]);
    }

    #[test]
    fn differences_and_their_names_are_bounded() {
        let base = Scope::opaque("a", 4096, true);
        let entry = |number: u32| (format!("{number:0100}"), "x".into());
        let many = Scope { extra: (0..1000).map(entry).collect(), ..base.clone() };
        let found = base.differences(&many);
        assert_eq!(found.len(), DIFFERENCES_MAX);
        assert!(found.iter().all(|difference| difference.field.len() <= VALUE_CHARS_MAX + 3));
    }

    #[test]
    fn two_names_of_one_layout_are_no_difference() {
        let base = Scope {
            dtype: "bfloat16".into(),
            page_tokens: 16,
            layers: (0, 2),
            kv_heads: (0, 1),
            head_dim: 64,
            layout: "page_first".into(),
            page_bytes: None,
            ..Scope::opaque("a", 1, true)
        };
        let bytes = base.resolved_page_bytes().unwrap();
        let same = Scope { layout: "layer_first".into(), page_bytes: Some(bytes), ..base.clone() };
        assert_eq!((base.id(), of(&base, &same)), (same.id(), vec![]));
    }
}
