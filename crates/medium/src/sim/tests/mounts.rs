//! Directories that are unmounted temporarily.

use super::*;

const DIR: &str = "/s/v";

#[test]
fn remounted_directory_has_all_its_files() {
    let disk = disk();
    put(&disk, "/s/v/a", b"contents");
    disk.create_dir(Path::new("/s/v/d")).unwrap();
    put(&disk, "/s/v/d/b", b"deeper");
    disk.unmount(Path::new(DIR)).unwrap();
    assert!(disk.is_unmounted(Path::new(DIR)));
    assert!(disk.list(Path::new(DIR)).unwrap().is_empty());
    let error = disk.open(Path::new("/s/v/a"), Access::default()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(disk.unmount(Path::new(DIR)).is_err());
    disk.mount(Path::new(DIR)).unwrap();
    assert!(disk.mount(Path::new(DIR)).is_err());
    assert_eq!(get(&disk, "/s/v/a").unwrap(), b"contents");
    assert_eq!(get(&disk, "/s/v/d/b").unwrap(), b"deeper");
}

#[test]
fn files_under_the_mount_point_are_hidden() {
    let disk = disk();
    put(&disk, "/s/v/a", b"volume");
    disk.unmount(Path::new(DIR)).unwrap();
    assert!(disk.created_under(Path::new(DIR)).is_empty());
    put(&disk, "/s/v/a", b"mount point");
    put(&disk, "/s/v/gone", b"x");
    disk.remove(Path::new("/s/v/gone")).unwrap();
    disk.create_dir(Path::new(DIR)).unwrap();
    put(&disk, "/s/elsewhere", b"x");
    let created = disk.created_under(Path::new(DIR));
    assert_eq!(created, [Path::new("/s/v/a"), Path::new("/s/v/gone")]);
    disk.mount(Path::new(DIR)).unwrap();
    assert_eq!(get(&disk, "/s/v/a").unwrap(), b"volume");
    disk.unmount(Path::new(DIR)).unwrap();
    assert_eq!(get(&disk, "/s/v/a").unwrap(), b"mount point");
}

#[test]
fn unmounted_volume_survives_a_power_loss() {
    let disk = disk();
    put(&disk, "/s/v/a", b"contents");
    disk.unmount(Path::new(DIR)).unwrap();
    for seed in seeds() {
        let after = disk.crash(seed);
        assert!(get(&after, "/s/v/a").is_none());
        after.mount(Path::new(DIR)).unwrap();
        assert_eq!(get(&after, "/s/v/a").unwrap(), b"contents");
    }
}

#[test]
fn unmounting_drops_data_of_a_failed_sync() {
    let disk = disk();
    let file = put(&disk, "/s/v/a", b"old");
    file.sync_data().unwrap();
    disk.sync_dir(Path::new(DIR)).unwrap();
    file.write_at(b"new", 0).unwrap();
    disk.fail_next_sync("/a", 0);
    assert!(file.sync_data().is_err());
    let on_disk = get(&disk.crash(0), "/s/v/a");
    disk.unmount(Path::new(DIR)).unwrap();
    disk.mount(Path::new(DIR)).unwrap();
    assert_eq!(get(&disk, "/s/v/a"), on_disk);
}
