use super::*;

fn span(base: u64, bytes: u32, stride: u64) -> Span {
    Span { base, bytes, stride }
}

#[test]
fn word_is_the_largest_that_divides_bases_lengths_and_strides() {
    for (spans, word) in [
        (vec![span(4096, 65_536, 65_536)], Word::B16),
        (vec![span(4096, 65_536, 65_544)], Word::B8),
        (vec![span(4096, 4100, 8192), span(1 << 20, 4096, 8192)], Word::B4),
        (vec![span(4104, 4096, 8192)], Word::B8),
        (vec![span(4096, 4098, 8192)], Word::B1),
    ] {
        assert_eq!(Layout::new(&spans, 3).unwrap().word(), word, "{spans:?}");
    }
}

#[test]
fn parts_begin_and_end_at_span_boundaries() {
    let spans = [span(1 << 20, 5000, 8192), span(2 << 20, 2048, 8192), span(3 << 20, 1, 8192)];
    let layout = Layout::new(&spans, 4).unwrap();
    assert_eq!(layout.page_bytes(), 7049);
    assert_eq!(layout.whole(), Part { spans: 0..3, units: 5 });
    assert_eq!(layout.part(&(0..7049)).unwrap(), layout.whole());
    assert_eq!(layout.part(&(5000..7048)).unwrap(), Part { spans: 1..2, units: 1 });
    assert_eq!(layout.part(&(5000..7049)).unwrap(), Part { spans: 1..3, units: 2 });
    // Written as pairs, because the linter refuses a literal range that ends before it begins.
    let wrong = [(0, 0), (0, 4999), (1, 5000), (5000, 5000), (7048, 5000), (0, 7050), (7049, 7049)];
    for (first, end) in wrong {
        assert!(layout.part(&(first..end)).is_err(), "{first}..{end}");
    }
    let pieces: Vec<_> = layout.pieces(&layout.whole(), 3).collect();
    assert_eq!(pieces[1], ((2 << 20) + 3 * 8192, 5000, 2048));
    assert!(layout.whole().fits(8192) && !layout.whole().fits(1 << 30));
}

#[test]
fn spans_that_share_bytes_or_alternate_unevenly_are_refused() {
    let apart = [
        // In this order: K and V that alternate, three layers that alternate, a span directly after
        // the last block of another span, and three spans far apart.
        vec![span(4096, 4096, 8192), span(8192, 4096, 8192)],
        vec![span(8192, 2048, 8192), span(4096, 4096, 8192), span(10_240, 2048, 8192)],
        vec![span(4096, 4096, 4096), span(4096 + 10 * 4096, 64, 4096)],
        vec![span(4096, 64, 100), span(1 << 20, 64, 128), span(2 << 20, 64, 100)],
    ];
    for spans in apart {
        assert!(Layout::new(&spans, 10).is_ok(), "{spans:?}");
    }
    let shared = [
        // The spans of the fourth list share no bytes, but alternate with different strides.
        vec![span(4096, 4096, 8192), span(4096, 4096, 8192)],
        vec![span(4096, 4096, 8192), span(8191, 4096, 8192)],
        vec![span(4096, 4096, 8192), span(8192, 4097, 8192)],
        vec![span(4096, 4096, 8192), span(8192, 4096, 16_384)],
        vec![span(4096, 4096, 4096), span(4096 + 9 * 4096, 64, 4096)],
        vec![span(4096, 4096, 12_288), span(8192, 4096, 12_288), span(10_000, 64, 12_288)],
    ];
    for spans in shared {
        assert!(Layout::new(&spans, 10).is_err(), "{spans:?}");
    }
}

#[test]
fn empty_oversized_or_overflowing_layouts_are_refused() {
    for (wrong, blocks) in [
        (vec![], 1),
        (vec![span(4096, 64, 64)], 0),
        (vec![span(0, 64, 64)], 1),
        (vec![span(4096, 0, 64)], 1),
        (vec![span(4096, 64, 63)], 2),
        (vec![span(4096, (1 << 30) + 1, 2 << 30)], 1),
        (vec![span(u64::MAX - 63, 64, 64)], 1),
        (vec![span(4096, 64, u64::MAX / 2)], 4),
        ((0..4097).map(|at| span(4096 + at * 64, 64, 1 << 30)).collect(), 1),
    ] {
        assert!(Layout::new(&wrong, blocks).is_err(), "{wrong:?}");
    }
    assert!(Layout::new(&[span(4096, 64, 0)], 1).is_ok());
}
