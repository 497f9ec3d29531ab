//! Metric families, filled sample by sample and then encoded.

use crate::limits::LABEL_CHARS_MAX;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::HashMap;
use std::fmt;

/// Number of characters of the digest that replaces the end of a long label value.
const DIGEST_CHARS: usize = 16;

/// The first part of the names of all families.
const PREFIX: &str = "ritornello";

/// The unit of a family, which ends its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// A number without a unit; of a yes-no question, 1 for yes and 0 for no.
    Count,
    Bytes,
    Seconds,
    Ratio,
}

impl Measure {
    fn unit(self) -> Option<Unit> {
        match self {
            Self::Count => None,
            Self::Bytes => Some(Unit::Bytes),
            Self::Seconds => Some(Unit::Seconds),
            Self::Ratio => Some(Unit::Other("ratio".to_owned())),
        }
    }
}

/// The description of a family.
#[derive(Debug)]
pub(super) struct Definition {
    /// Name without prefix and unit.
    pub(super) name: &'static str,
    pub(super) measure: Measure,
    pub(super) help: &'static str,
}

#[cfg(test)]
impl Definition {
    /// The name with its unit, without prefix.
    pub(super) fn full_name(&self) -> String {
        let unit = self.measure.unit().map(|unit| format!("_{}", unit.as_str()));
        format!("{}{}", self.name, unit.unwrap_or_default())
    }
}

/// The value of a sample.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Integer(u64),
    Real(f64),
    Histogram(Histogram),
}

/// Observations of a histogram.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    pub(super) sum: f64,
    pub(super) count: u64,
    /// The upper bound of each bucket, and the number of observations in this bucket only.
    pub(super) buckets: Vec<(f64, u64)>,
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Family {
    definition: &'static Definition,
    kind: MetricType,
    samples: Vec<(Labels, Value)>,
}

/// Families in the order of their first sample. The samples of a family stay together, as
/// OpenMetrics requires.
#[derive(Debug, Default)]
pub(super) struct Families {
    families: Vec<Family>,
    by_name: HashMap<&'static str, usize>,
}

impl Families {
    /// Returns a writer of samples that all have the labels `base`.
    pub(super) fn rows(&mut self, base: Labels) -> Rows<'_> {
        Rows { families: self, base }
    }

    fn add(&mut self, definition: &'static Definition, kind: MetricType, sample: (Labels, Value)) {
        let at = *self.by_name.entry(definition.name).or_insert_with(|| {
            self.families.push(Family { definition, kind, samples: Vec::new() });
            self.families.len() - 1
        });
        self.families[at].samples.push(sample);
    }

    /// Returns all families in the text format of OpenMetrics.
    ///
    /// # Errors
    /// Errors of the encoder.
    pub(super) fn encode(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Family { definition, kind, samples } in &self.families {
            let unit = definition.measure.unit();
            let mut family = encoder.encode_descriptor(
                definition.name,
                definition.help,
                unit.as_ref(),
                *kind,
            )?;
            for (labels, value) in samples {
                let mut metric = family.encode_family(labels)?;
                match (kind, value) {
                    (MetricType::Counter, Value::Integer(value)) => {
                        ConstCounter::new(*value).encode(metric)?;
                    }
                    (MetricType::Counter, Value::Real(value)) => {
                        ConstCounter::new(*value).encode(metric)?;
                    }
                    (_, Value::Integer(value)) => ConstGauge::new(*value).encode(metric)?,
                    (_, Value::Real(value)) => ConstGauge::new(*value).encode(metric)?,
                    (_, Value::Histogram(Histogram { sum, count, buckets })) => {
                        metric.encode_histogram::<NoLabelSet>(*sum, *count, buckets, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Writes samples that share labels.
pub(super) struct Rows<'a> {
    families: &'a mut Families,
    base: Labels,
}

impl Rows<'_> {
    /// Adds the value of a gauge.
    pub(super) fn gauge<const N: usize>(
        &mut self,
        definition: &'static Definition,
        labels: [(&'static str, String); N],
        value: impl Into<Value>,
    ) {
        self.add(definition, MetricType::Gauge, labels, value.into());
    }

    /// Adds the value of a counter.
    pub(super) fn counter<const N: usize>(
        &mut self,
        definition: &'static Definition,
        labels: [(&'static str, String); N],
        value: impl Into<Value>,
    ) {
        self.add(definition, MetricType::Counter, labels, value.into());
    }

    /// Adds the observations of a histogram.
    pub(super) fn histogram<const N: usize>(
        &mut self,
        definition: &'static Definition,
        labels: [(&'static str, String); N],
        observations: Histogram,
    ) {
        self.add(definition, MetricType::Histogram, labels, Value::Histogram(observations));
    }

    fn add<const N: usize>(
        &mut self,
        definition: &'static Definition,
        kind: MetricType,
        labels: [(&'static str, String); N],
        value: Value,
    ) {
        let labels = self.base.iter().cloned().chain(labels).collect();
        self.families.add(definition, kind, (labels, value));
    }
}

/// Returns `text` as a label value without control characters, of at most [`LABEL_CHARS_MAX`]
/// characters. A digest replaces the end of a longer text, so that texts with an equal beginning do
/// not become one series. The encoder escapes quotes, backslashes and line feeds.
pub(super) fn label(text: &str) -> String {
    let clean = |char: char| if char.is_control() { '\u{fffd}' } else { char };
    if text.chars().count() <= LABEL_CHARS_MAX {
        return text.chars().map(clean).collect();
    }
    let digest = blake3::hash(text.as_bytes()).to_hex();
    let end = format!("~{}", &digest[..DIGEST_CHARS]);
    text.chars().take(LABEL_CHARS_MAX - end.len()).map(clean).chain(end.chars()).collect()
}
