use super::published::ASSUMED_HIT_RATES;
use super::*;
use proptest::prelude::*;

/// Allowed error of rounding: relative, and absolute for small numbers.
const ROUNDING: f64 = 1e-9;

fn at_most(less: f64, more: f64) -> bool {
    less <= more * (1.0 + ROUNDING) + ROUNDING
}

fn prefills() -> impl Strategy<Value = Prefill> {
    let shapes = prop_oneof![Just(ModelShape::LLAMA3_8B), Just(ModelShape::QWEN25_05B)];
    (shapes, 1e12..1e16, 0.0..HALF_RATE_TOKENS_MAX)
        .prop_map(|(shape, flops, half_rate_tokens)| Prefill { shape, flops, half_rate_tokens })
}

fn transfers() -> impl Strategy<Value = Transfer> {
    (1e8..1e12, any::<bool>()).prop_map(|(rate, layered)| Transfer { rate, layered })
}

proptest! {
    #[test]
    fn slower_machine_or_longer_prompt_never_answers_earlier(
        prefill in prefills(), transfer in transfers(), prefix in 0.0..1e6, new in 1.0..1e6,
        times in 1.0..10.0
    ) {
        let base = prefill.run(&transfer, prefix, new).ttft;
        let slow_read = Transfer { rate: transfer.rate / times, ..transfer };
        prop_assert!(at_most(base, prefill.run(&slow_read, prefix, new).ttft));
        let apart = Transfer { layered: false, ..transfer };
        prop_assert!(at_most(base, prefill.run(&apart, prefix, new).ttft));
        let slow_compute = Prefill { flops: prefill.flops / times, ..prefill };
        prop_assert!(at_most(base, slow_compute.run(&transfer, prefix, new).ttft));
        prop_assert!(at_most(base, prefill.run(&transfer, prefix * times, new).ttft));
        prop_assert!(at_most(base, prefill.run(&transfer, prefix, new * times).ttft));
    }

    #[test]
    fn bubble_is_at_least_read_minus_compute_and_at_most_read(
        prefill in prefills(), transfer in transfers(), prefix in 0.0..1e6, new in 1.0..1e6
    ) {
        let outcome = prefill.run(&transfer, prefix, new);
        let read = prefix * prefill.shape.token_bytes / transfer.rate;
        prop_assert!(at_most((read - outcome.compute).max(0.0), outcome.bubble));
        prop_assert!(at_most(outcome.bubble, read));
        let sum = outcome.compute + outcome.bubble;
        prop_assert!(at_most(outcome.ttft, sum) && at_most(sum, outcome.ttft));
    }

    #[test]
    fn bubble_grows_with_hit_rate_and_only_first_layer_waits_before_crossover(
        prefill in prefills(), transfer in transfers(), tokens in 64.0..1e6, hit in 0.0..1.0,
        share in 0.0..1.0
    ) {
        let bubble = |hit| prefill.at(&transfer, tokens, hit).bubble;
        prop_assert!(at_most(bubble(hit * share), bubble(hit)));
        let Some(crossover) = prefill.crossover(&transfer, tokens) else {
            prop_assert!(!transfer.layered);
            return Ok(());
        };
        let new = (tokens * (1.0 - hit)).max(1.0);
        let read = (tokens - new) * prefill.shape.token_bytes / transfer.rate;
        let first = read / f64::from(prefill.shape.layers);
        if tokens - new < tokens * crossover {
            prop_assert!(at_most(bubble(hit), first), "{} {first}", bubble(hit));
        } else if tokens - new > tokens * crossover * (1.0 + 1e-6) {
            prop_assert!(bubble(hit) > first);
        }
    }
}

#[test]
fn media_are_ordered_by_their_rates() {
    for tokens in [8192.0, 32_768.0, 131_072.0] {
        for hit in ASSUMED_HIT_RATES {
            let ttft = |medium: Medium| {
                let transfer = medium.transfer(&Rates::PUBLISHED);
                Prefill::PUBLISHED.at(&transfer, tokens, hit).ttft
            };
            assert!(ttft(Medium::HbmDram) <= ttft(Medium::DiskLayered), "{tokens} {hit}");
            assert!(ttft(Medium::GpuIssued) <= ttft(Medium::DiskLayered), "{tokens} {hit}");
            assert!(ttft(Medium::DiskLayered) < ttft(Medium::DiskCopies), "{tokens} {hit}");
        }
    }
    let narrow = Rates { link: 10e9, ..Rates::PUBLISHED };
    assert_eq!(Medium::DiskLayered.transfer(&narrow).rate, 10e9);
    assert_eq!(Medium::GpuIssued.transfer(&narrow).rate, 25.9e9);
}

#[test]
fn published_rows_keep_their_figures() {
    let rows = published();
    let figures = [98.31, 4.86, 24.37, 3.544, 7.947, -57.72, -2.31, 3.75, 15.0, -26.82, -67.36];
    assert_eq!(rows.len(), figures.len());
    for (row, figure) in rows.iter().zip(figures) {
        assert!((row.model / figure - 1.0).abs() < 2e-3, "{}: {}", row.figure, row.model);
        let near = (row.model / row.published - 1.0).abs() < 0.05;
        assert!(near || !row.reproduced, "{}: {}", row.figure, row.model);
        assert!(!row.why.is_empty(), "{}", row.figure);
    }
    // The figures on which the texts in `PublishedRow::why` rely.
    let (prefill, rates) = (Prefill::PUBLISHED, Rates::PUBLISHED);
    let copies = Medium::DiskCopies.transfer(&rates);
    let ttft = |medium: Medium, prefix: f64| {
        prefill.run(&medium.transfer(&rates), prefix * 1024.0, (128.0 - prefix) * 1024.0).ttft
    };
    for (prefix, saved) in [(126.0, 0.659), (64.0, 0.058)] {
        let found = 1.0 - ttft(Medium::GpuIssued, prefix) / ttft(Medium::DiskCopies, prefix);
        assert!((found - saved).abs() < 5e-4, "{prefix}: {found}");
    }
    let crossover = prefill.crossover(&Medium::GpuIssued.transfer(&rates), 131_072.0);
    assert!((crossover.unwrap() - 0.981).abs() < 5e-4, "{crossover:?}");
    let read = 32.0 * 1024.0 * prefill.shape.token_bytes / copies.rate;
    let share = read / ttft(Medium::DiskCopies, 32.0);
    assert!((share - 0.023).abs() < 5e-4, "{share}");
    let without = Prefill { half_rate_tokens: 0.0, ..prefill };
    let computing = without.compute(112.0 * 1024.0, 16.0 * 1024.0);
    assert!((computing - 3.43).abs() < 5e-3, "{computing}");
    let prices = Prices::PUBLISHED;
    let needed = prices.per_hour(Medium::GpuIssued) / prices.per_hour(Medium::DiskCopies) / 0.338;
    assert!((needed - 2.17).abs() < 0.01, "{needed}");
}

/// Estimates, on an assumed machine, of the time to the first token of a prompt of 32k tokens, 90 %
/// of them hits, for each medium. The design of the paths from a store into a GPU is based on these
/// estimates.
#[test]
fn paths_into_a_gpu_keep_their_estimates() {
    let prefill = Prefill { flops: 550e12, half_rate_tokens: 500.0, ..Prefill::PUBLISHED };
    let rates = Rates { link: 55e9, disk: 25e9, copies: 25e9 };
    let ms = |medium: Medium| {
        (1e3 * prefill.at(&medium.transfer(&rates), 32_768.0, 0.9).ttft).round() as u32
    };
    assert_eq!(Medium::ALL.map(ms), [210, 363, 213, 213]);
    assert_eq!((1e3 * prefill.compute(0.0, 32_768.0)).round(), 1364.0);
}

#[test]
fn cost_counts_the_parts_that_a_medium_uses() {
    let prices = Prices { gpu: 4.0, dram: 2.0, ssd: 1.0 };
    assert_eq!(Medium::ALL.map(|medium| prices.per_hour(medium)), [6.0, 7.0, 7.0, 5.0]);
    assert_eq!(prices.per_million_tokens(Medium::HbmDram, 500_000.0, 300.0), 1.0);
}
